"""From what a job names (files, folders, globs) to the files themselves, with their sizes and hashes."""

from __future__ import annotations

import glob
import hashlib
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from packmule.data.files import read_json, write_json
from packmule.data.kinds import Kind, kind_of, supported
from packmule.errors import DataError, PackmuleError

_SETTLED_NS = 2_000_000_000
"""A file changed this short before it was hashed may change again within the clock's grain."""


class Source(NamedTuple):
    """One file, its size and the sha256 of its bytes."""

    path: Path
    bytes: int
    modified_ns: int
    sha256: str

    @property
    def kind(self) -> Kind:
        """Container and compression."""
        kind = kind_of(self.path)
        assert kind is not None, self.path
        return kind

    def check_unchanged(self, status: os.stat_result) -> None:
        """Raise DataError unless the file is as it was hashed."""
        if (status.st_size, status.st_mtime_ns) != (self.bytes, self.modified_ns):
            raise DataError(
                f"{self.path} changed while it was being read.", "start again when nothing writes to it"
            )


def find_files(dataset: Sequence[str]) -> list[Path]:
    """The files behind paths, folders (searched to the bottom) and glob patterns, in one list.

    Raises:
        DataError: as `find_groups`.
    """
    return [path for group in find_groups(dataset) for path in group]


def find_groups(dataset: Sequence[str]) -> list[list[Path]]:
    """The files behind each path, folder (searched to the bottom) or glob pattern.

    Folders and globs are sorted; the order of `dataset` is kept; a file named twice counts where it
    is named first.

    Raises:
        DataError: a path that does not exist, nothing usable found, or an unknown kind of file.
    """
    if not dataset:
        raise DataError("no dataset was given.", f"give files, folders or patterns of {supported()}")
    found: set[Path] = set()
    groups = []
    for item in dataset:
        group: dict[Path, None] = {}
        for candidate in _candidates(item):
            if kind_of(candidate) is None:
                raise DataError(
                    f"{candidate}: {candidate.suffix or 'no suffix'!r} is not a known kind of data.",
                    f"supported: {supported()}",
                )
            resolved = candidate.resolve()
            if resolved not in found:
                group[resolved] = None
        found |= group.keys()
        groups.append(list(group))
    return groups


def _candidates(item: str) -> list[Path]:
    path = Path(item).expanduser()
    if path.is_file():
        return [path]
    if path.is_dir():
        found = sorted(p for p in path.rglob("*") if _usable(p.relative_to(path)) and p.is_file())
        if not found:
            raise DataError(
                f"{path} holds no file of a known kind.",
                f"name the files or folder that hold the data: {supported()}",
            )
        return found
    matches = [Path(match) for match in glob.glob(str(path), recursive=True)]
    found = sorted(p for p in matches if p.is_file())
    if not found:
        raise DataError(f"dataset {item!r}: no such file, folder or pattern.", "check the path")
    return found


def _usable(relative: Path) -> bool:
    hidden = any(part.startswith(".") for part in relative.parts)
    return not hidden and kind_of(relative) is not None


def hash_file(path: Path, progress: Callable[[int], None]) -> Source:
    """Read a file once for its sha256; `progress` gets the bytes of each block.

    Raises:
        DataError: it cannot be read.
    """
    digest = hashlib.sha256()
    try:
        with open(path, "rb", buffering=0) as file:
            status = os.fstat(file.fileno())
            while block := file.read(1 << 20):
                digest.update(block)
                progress(len(block))
    except OSError as error:
        raise DataError(
            f"cannot read {path}: {error.strerror}.", "check the path and its permissions"
        ) from None
    return Source(path, status.st_size, status.st_mtime_ns, digest.hexdigest())


class Hashes:
    """Hashes of files that have not changed since, kept in a JSON file: a resume reads no data again.

    Size and time of change decide. A hash taken within two seconds of the change is not kept.

    Args:
        path: where they are kept; one that cannot be read counts as empty.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._known = read_json(path) if path.exists() else {}
        except PackmuleError:
            self._known = {}
        self._used: dict[str, list[int | str]] = {}

    def of(self, path: Path, progress: Callable[[int], None]) -> Source:
        """The file's hash, read where it must be; raises as `hash_file`."""
        try:
            status = path.stat()
        except OSError as error:
            raise DataError(f"cannot read {path}: {error.strerror}.", "check the path") from None
        known = self._known.get(str(path))
        if isinstance(known, list) and known[:2] == [status.st_size, status.st_mtime_ns] and len(known) == 3:
            self._used[str(path)] = known
            progress(status.st_size)
            return Source(path, status.st_size, status.st_mtime_ns, str(known[2]))
        now = time.time_ns()
        source = hash_file(path, progress)
        if now - source.modified_ns > _SETTLED_NS:
            self._used[str(path)] = [source.bytes, source.modified_ns, source.sha256]
        return source

    def save(self) -> None:
        """Keep the hashes that were asked for.

        Raises:
            DiskError: the file cannot be written.
        """
        if self._used != self._known:
            write_json(self._path, self._used)
