"""A disk in memory that knows what a power loss may leave of it.

The model is what POSIX promises and no more. Per file, what `sync` or `sync_file` saw is
durable. Of everything since, each 4096-byte sector keeps any one of its versions, or the
durable one, or is torn between two; the size is any it has had; all on their own. Per folder,
what `sync_folder` saw is durable; each later change of a name is kept or lost on its own (a
rename is one change). So a rename may outlive the contents of the file it names, and a file
its name.
"""

from __future__ import annotations

import random
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from packmule.errors import DamagedFile, DiskError
from packmule.kernels.transfers import Span
from packmule.tiers.disk import Checksum, Handle, read_in_turn, write_in_turn

SECTOR = 4096
ATOM = 512


class Killed(BaseException):
    """The process died here: what it wrote is in the page cache, nothing was synced."""


@dataclass(eq=False)
class File:
    """Contents as a process sees them, and as the device has them."""

    live: bytearray = field(default_factory=bytearray)
    durable: bytes = b""
    versions: dict[int, list[bytes]] = field(default_factory=dict)
    sizes: list[int] = field(default_factory=list)
    truncated: bool = False

    def resize(self, size: int) -> None:
        self.truncated |= size < len(self.live)
        self.live[size:] = bytes(max(size - len(self.live), 0))
        self.sizes.append(size)

    def write(self, data: bytes, offset: int) -> None:
        if offset + len(data) > len(self.live):
            self.resize(offset + len(data))
        self.live[offset : offset + len(data)] = data
        for sector in range(offset // SECTOR, -(-(offset + len(data)) // SECTOR)):
            version = bytes(self.live[sector * SECTOR : (sector + 1) * SECTOR])
            self.versions.setdefault(sector, []).append(version)

    def sync(self) -> None:
        self.durable = bytes(self.live)
        self.versions.clear()
        self.sizes.clear()
        self.truncated = False

    def after_power_loss(self, rng: random.Random, keep: float) -> File:
        size = len(self.durable)
        if self.sizes and rng.random() < max(keep, 0.5):
            size = rng.choice(self.sizes) if rng.random() < 0.3 else len(self.live)
        old = b"" if self.truncated and rng.random() < 0.5 else self.durable
        found = bytearray(old[:size])
        found += bytes(size - len(found))
        for sector, versions in self.versions.items():
            start = sector * SECTOR
            if start >= size or rng.random() >= keep:
                continue
            version = versions[-1] if rng.random() < 0.7 else rng.choice(versions)
            end = min(start + len(version), size)
            if rng.random() < 0.1:
                atom = ATOM if len(self.live) >= SECTOR else 1
                end = min(end, start + rng.randrange(0, len(version) + 1, atom))
            found[start:end] = version[: end - start]
        return File(live=found, durable=bytes(found))


@dataclass(eq=False)
class Folder:
    """Names as a process sees them, as the device has them, and the changes between."""

    live: dict[str, File | Folder] = field(default_factory=dict)
    durable: dict[str, File | Folder] = field(default_factory=dict)
    changes: list[dict[str, File | Folder | None]] = field(default_factory=list)

    def change(self, **names: File | Folder | None) -> None:
        self.changes.append(names)
        _apply(self.live, names)

    def sync(self) -> None:
        self.durable = dict(self.live)
        self.changes.clear()

    def after_power_loss(self, rng: random.Random, keep: float) -> Folder:
        names = dict(self.durable)
        for change in self.changes:
            if rng.random() < keep:
                _apply(names, change)
        kept = {name: node.after_power_loss(rng, keep) for name, node in names.items()}
        return Folder(live=kept, durable=dict(kept))


def _apply(names: dict[str, File | Folder], change: dict[str, File | Folder | None]) -> None:
    for name, node in change.items():
        if node is None:
            names.pop(name, None)
        else:
            names[name] = node


class RecordingDisk:
    """A Disk in memory. The root folder exists and is durable.

    Args:
        root: go on with this tree, as a new process would.
        after: called after every operation that changes something.
        kill_at: raise Killed before this operation, counting only those that are not writes
            into a file, because those are where the order matters.
        dropped: the site (see `sites`) whose syncs do nothing, as if deleted from the code.

    Attributes:
        log: "operation path" of every operation that changed something.
        sites: where syncs were called from: "function: operation name", the function being
            the outermost one of packmule.checkpoint, digits in names replaced by N.
    """

    def __init__(
        self,
        root: Folder | None = None,
        after: Callable[[RecordingDisk], None] | None = None,
        kill_at: int | None = None,
        dropped: str | None = None,
    ) -> None:
        self.root = root or Folder()
        self.log: list[str] = []
        self.sites: set[str] = set()
        self._after = after
        self._kill_at = kill_at
        self._dropped = dropped
        self._open: dict[int, File] = {}
        self._opened = 0
        self._begun = 0

    def after_power_loss(self, rng: random.Random) -> RecordingDisk:
        """What the device may hold if the power went now, on a machine that has restarted."""
        keep = rng.choice((0.0, 0.05, 0.5, 0.5, 0.95, 1.0))
        return RecordingDisk(self.root.after_power_loss(rng, keep))

    def create(self, path: Path, size: int) -> None:
        self._begin()
        if path.name in self._folder(path.parent).live:
            raise DiskError(f"{path}: exists.")
        file = File()
        file.resize(size)
        self._folder(path.parent).change(**{path.name: file})
        self._end("create", path)

    def open(self, path: Path, write: bool) -> Handle:
        self._opened += 1
        self._open[self._opened] = self.file(path)
        return Handle(path, self._opened, direct=False)

    def close(self, handle: Handle) -> None:
        del self._open[handle.number]

    def read_into(self, handle: Handle, buffer: memoryview, offset: int) -> None:
        found = self._open[handle.number].live[offset : offset + len(buffer)]
        if len(found) < len(buffer):
            raise DamagedFile(f"{handle.path} ends at byte {offset + len(found)}.")
        buffer[:] = found

    def write(self, handle: Handle, buffer: memoryview, offset: int) -> None:
        self._open[handle.number].write(bytes(buffer), offset)
        self._end("write", handle.path)

    def read_summed(self, handle: Handle, spans: Sequence[Span], checksum: Checksum | None) -> list[int]:
        return read_in_turn(self, handle, spans, checksum)

    def write_summed(self, handle: Handle, spans: Sequence[Span], checksum: Checksum | None) -> list[int]:
        return write_in_turn(self, handle, spans, checksum)

    def sync(self, handle: Handle) -> None:
        self._sync("sync", handle.path, self._open[handle.number])

    def read_bytes(self, path: Path) -> bytes:
        return bytes(self.file(path).live)

    def write_bytes(self, path: Path, data: bytes) -> None:
        self._begin()
        folder = self._folder(path.parent)
        if path.name not in folder.live:
            folder.change(**{path.name: File()})
        file = self.file(path)
        file.resize(0)
        file.write(data, 0)
        self._end("write_bytes", path)

    def append_bytes(self, path: Path, data: bytes) -> None:
        self._begin()
        folder = self._folder(path.parent)
        if path.name not in folder.live:
            folder.change(**{path.name: File()})
        file = self.file(path)
        file.write(data, len(file.live))
        self._end("append_bytes", path)

    def sync_file(self, path: Path) -> None:
        self._sync("sync_file", path, self.file(path))

    def rename(self, source: Path, target: Path) -> None:
        self._begin()
        assert source.parent == target.parent
        folder = self._folder(source.parent)
        replaced = folder.live.get(target.name)
        if isinstance(replaced, Folder) and replaced.live:
            raise DiskError(f"{target}: not empty.")
        folder.change(**{source.name: None, target.name: self._node(source)})
        self._end("rename", source)

    def sync_folder(self, path: Path) -> None:
        self._sync("sync_folder", path, self._folder(path))

    def remove(self, path: Path) -> None:
        self._begin()
        node = self._node(path)
        if isinstance(node, Folder) and node.live:
            raise DiskError(f"{path}: not empty.")
        self._folder(path.parent).change(**{path.name: None})
        self._end("remove", path)

    def make_folder(self, path: Path) -> None:
        if self.exists(path):
            return
        self._begin()
        self._folder(path.parent).change(**{path.name: Folder()})
        self._end("make_folder", path)

    def exists(self, path: Path) -> bool:
        try:
            self._node(path)
        except DiskError:
            return False
        return True

    def size(self, path: Path) -> int:
        return len(self.file(path).live)

    def list(self, path: Path) -> tuple[str, ...]:
        return tuple(sorted(self._folder(path).live))

    def free_bytes(self, path: Path) -> int:
        return 1 << 40

    def _sync(self, kind: str, path: Path, node: File | Folder) -> None:
        self._begin()
        site = f"{_caller()}: {kind} {re.sub('[0-9]+', 'N', path.name) or '/'}"
        self.sites.add(site)
        if site != self._dropped:
            node.sync()
        self._end(kind, path)

    def _begin(self) -> None:
        if self._kill_at == self._begun:
            raise Killed
        self._begun += 1

    def _end(self, kind: str, path: Path) -> None:
        self.log.append(f"{kind} {path}")
        if self._after:
            self._after(self)

    def _node(self, path: Path) -> File | Folder:
        node: File | Folder = self.root
        for name in path.parts[1:]:
            if not isinstance(node, Folder) or name not in node.live:
                raise DiskError(f"{path}: does not exist.")
            node = node.live[name]
        return node

    def file(self, path: Path) -> File:
        node = self._node(path)
        if not isinstance(node, File):
            raise DiskError(f"{path}: is a folder.")
        return node

    def _folder(self, path: Path) -> Folder:
        node = self._node(path)
        if not isinstance(node, Folder):
            raise DiskError(f"{path}: is a file.")
        return node


def _caller() -> str:
    frame, name = sys._getframe(1), "test"
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_globals.get("__name__", "").startswith("packmule.checkpoint."):
            name = frame.f_code.co_name
    return name
