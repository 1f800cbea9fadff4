"""Small file operations shared by data and weights: whole reads at an offset, folders that appear
complete or not at all, JSON in and out. No formats live here."""

from __future__ import annotations

import errno
import json
import os
import shutil
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from packmule.errors import DamagedFile, DataError, DiskError

_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EFBIG)


@contextmanager
def disk_errors(path: Path | str) -> Iterator[None]:
    """Turn an OSError raised inside into a DiskError that names `path` and the way out.

    Raises:
        DiskError: the disk is full, read-only or failing, or the path cannot be written.
    """
    try:
        yield
    except OSError as error:
        where = error.filename or path
        if error.errno in _DISK_ERRORS:
            hint = "free space on this disk, or choose another output folder"
        else:
            hint = "choose an output folder you can write to"
        raise DiskError(f"cannot write {where}: {error.strerror or error}.", hint) from error


@contextmanager
def atomic_folder(target: Path) -> Iterator[Path]:
    """A temporary sibling folder that becomes `target` when the body ends without an error.

    Files are synced before the rename, so a crash leaves either the whole folder or none of it. An
    older `target` is replaced; a temporary folder left by a crash is swept away.

    Raises:
        DiskError: see `disk_errors`.
    """
    temporary = target.with_name(target.name + ".partial")
    replaced = target.with_name(target.name + ".replaced")
    with disk_errors(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
    try:
        yield temporary
        with disk_errors(target):
            for path in sorted(temporary.rglob("*")):
                sync(path)
            sync(temporary)
            shutil.rmtree(replaced, ignore_errors=True)
            if target.exists():
                target.rename(replaced)
            temporary.rename(target)
            sync(target.parent)
            shutil.rmtree(replaced, ignore_errors=True)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


@contextmanager
def atomic_file(target: Path) -> Iterator[Path]:
    """A temporary sibling path that becomes the file `target` when the body ends without an error.

    It is synced before the rename, so a crash leaves either the whole file or what was there before.

    Raises:
        DiskError: see `disk_errors`.
    """
    temporary = target.with_name(target.name + ".partial")
    try:
        with disk_errors(target):
            target.parent.mkdir(parents=True, exist_ok=True)
            yield temporary
            sync(temporary)
            temporary.rename(target)
            sync(target.parent)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def sync(path: Path) -> None:
    """fsync a file or a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    """Write indented JSON under a temporary name, sync it and rename it over `path`."""
    write_text(path, json.dumps(data, indent=2, ensure_ascii=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write text under a temporary name, sync it and rename it over `path`.

    Raises:
        DiskError: see `disk_errors`.
    """
    temporary = path.with_name(path.name + ".partial")
    with disk_errors(path):
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(path)
        sync(path.parent)


def read_text(path: Path) -> str:
    """The text of a small UTF-8 file.

    Raises:
        DataError: it is missing, unreadable or not UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}.", "check the path") from None
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 at byte {error.start}.", "restore the file") from None


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
        DataError: missing, unreadable, not JSON, or not an object.
    """
    text = read_text(path)
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is not JSON: {error}.", "restore the file") from None
    if not isinstance(data, dict):
        raise DataError(f"{path} holds no JSON object.", "restore the file")
    return data


def copy_files(source: Path, target: Path, names: Sequence[str]) -> None:
    """Copy those of `names` that the folder `source` holds; nothing when it is a file or the target.

    Raises:
        DiskError: the target cannot be written.
    """
    for name in names:
        if source.is_dir() and (source / name).exists() and source.resolve() != target.resolve():
            with disk_errors(target / name):
                shutil.copyfile(source / name, target / name)


class Reader:
    """Reads ranges of one file by pread: nothing is mapped and nothing is kept.

    Args:
        path: the file; it stays open until `close`, the end of the `with` block or of the object.

    Raises:
        DataError: the file cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise DataError(f"cannot open {path}: {error.strerror}.", "check the path") from None
        # Whoever fails between opening several files leaves none open.
        self._end = weakref.finalize(self, os.close, self._descriptor)
        self.bytes = os.fstat(self._descriptor).st_size

    @classmethod
    def of_length(cls, path: Path, length: int) -> Reader:
        """Open a file that Packmule made and knows the bytes of.

        Raises:
            DataError: it cannot be opened.
            DamagedFile: it has another length.
        """
        reader = cls(path)
        if reader.bytes != length:
            reader.close()
            raise DamagedFile(
                f"{path} has {reader.bytes} bytes instead of {length}.",
                "delete its folder; it is made again",
            )
        return reader

    def read_into(self, out: np.ndarray, offset: int) -> None:
        """Fill `out` (any dtype, contiguous) with the bytes from `offset` on.

        Raises:
            DamagedFile: the file ends first.
            DiskError: the disk cannot read it.
        """
        if not out.size:
            return
        if not 0 <= offset <= self.bytes:
            raise DamagedFile(
                f"{self.path} has {self.bytes} bytes, but those from {offset} on are needed.",
                "the file is truncated, or what points into it is damaged; get it again",
            )
        view, at = out.data.cast("B"), offset
        while len(view):
            try:
                # An offset out of a damaged file may be none at all.
                got = os.preadv(self._descriptor, [view], at) if 0 <= at < self.bytes else 0
            except OSError as error:
                raise DiskError(f"cannot read {self.path}: {error.strerror}.", "check the disk") from None
            if not got:
                raise DamagedFile(
                    f"{self.path} ends at byte {self.bytes}, but bytes {offset} to {offset + out.nbytes} "
                    "are needed.",
                    "the file is truncated; get it again",
                )
            view, at = view[got:], at + got

    def read(self, offset: int, length: int) -> bytes:
        """`length` bytes from `offset`; raises as `read_into`."""
        out = np.empty(length, np.uint8)
        self.read_into(out, offset)
        return out.tobytes()

    def forget(self, offset: int, length: int) -> None:
        """Tell the kernel that this range will not be read again soon."""
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._descriptor, offset, length, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        """Close the file; harmless when repeated."""
        self._end()
        self._descriptor = -1

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
