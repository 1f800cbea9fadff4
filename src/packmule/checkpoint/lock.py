"""One process tree per run: an advisory lock on the file `lock` of the run folder.

The lock belongs to the open file, so a child that inherits it keeps the run locked when its
parent is killed, and it is gone when the last of them ends, however it ends. This is about
processes, not data: it does not go through a Disk.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
from pathlib import Path
from types import TracebackType
from typing import Self

from packmule.errors import DiskError, PackmuleError

LOCK_NAME = "lock"


class RunLock:
    """Holds a run folder, which must exist, until closed.

    Raises:
        PackmuleError: another process holds it; names its id and host.
        DiskError: the file cannot be made or the file system has no locks.
    """

    def __init__(self, run: Path) -> None:
        path = run / LOCK_NAME
        try:
            self._number = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise DiskError(
                f"{path}: cannot open: {error.strerror}.",
                "use a folder this user can write to",
            ) from None
        try:
            fcntl.flock(self._number, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.pread(self._number, 200, 0).decode(errors="replace").split()
            os.close(self._number)
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise DiskError(
                    f"{path}: cannot lock: {error.strerror}.",
                    "put the run on a file system that has locks",
                ) from None
            who = f"process {holder[0]} on {holder[1]}" if len(holder) == 2 else "another process"
            raise PackmuleError(
                f"{run} is in use by {who}.", "wait for it or stop it, or use another folder"
            ) from None
        os.ftruncate(self._number, 0)
        os.pwrite(self._number, f"{os.getpid()} {socket.gethostname()}\n".encode(), 0)

    def fileno(self) -> int:
        """The open file, to pass on to a child (`subprocess` argument `pass_fds`)."""
        return self._number

    def close(self) -> None:
        """Release the run, unless a child holds it too."""
        if self._number >= 0:
            os.close(self._number)
            self._number = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
