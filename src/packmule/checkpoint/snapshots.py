"""Snapshots: full copies of a commit in folders `checkpoint-N`, for when a run is damaged.

A snapshot is a run folder with one slot per block. It is built under a temporary name and
renamed when all of it is durable, so a folder `checkpoint-N` is whole unless it was damaged
later or is half removed; `newest` passes over those.

It is filled by whoever has the planes in memory (`SnapshotWriter`), in the same pass that stores
them in the run, or copied from a commit that is there (`snapshot`, `keep_best`).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from pathlib import Path

from packmule.checkpoint.head import (
    HEAD_NAME,
    STATE_NAME,
    BlockHead,
    Head,
    Progress,
    encode,
    read_head,
    seal,
)
from packmule.checkpoint.layout import StateLayout
from packmule.checkpoint.reader import Report, StateReader, span_of
from packmule.checkpoint.store import StateStore
from packmule.errors import ConfigError, DamagedFile, DiskError
from packmule.tiers.disk import Checksum, Disk, Handle, remove_folder

_NAME = re.compile(r"checkpoint-(\d+)")

BEST = "best"
"""The folder of the snapshot that is kept for its evaluation, apart from the numbered ones."""


def snapshot_path(run: Path, step: int) -> Path:
    """The folder of a step's snapshot."""
    return run / f"checkpoint-{step}"


def is_snapshot(folder: Path) -> bool:
    """Whether a folder's name is that of a snapshot."""
    return folder.name == BEST or _NAME.fullmatch(folder.name) is not None


def snapshot(store: StateStore, buffer: memoryview, report: Report | None = None) -> Path:
    """Copy the last commit to `checkpoint-N` of its run, N being its step, verifying it on the way.

    A snapshot of the same step that is there already is replaced. Updates may be under way,
    a commit may not.

    Args:
        buffer: at least `store.layout.chunk_bytes`, page-aligned.

    Returns:
        The folder, durable when this returns.

    Raises:
        DiskError: it does not fit; nothing is left behind.
        DamagedFile: the run's own state is damaged.
    """
    if store.head is None:
        raise RuntimeError("nothing has been committed")
    return _keep(store, snapshot_path(store.folder, store.head.step), buffer, report)


def keep_best(store: StateStore, buffer: memoryview, report: Report | None = None) -> Path:
    """Copy the last commit to the run's folder `best`, in place of what is there; as `snapshot`.

    A crash may leave no `best`: the caller, who knows which step is best, makes it again.
    """
    return _keep(store, store.folder / BEST, buffer, report)


def best_step(disk: Disk, run: Path, checksum: Checksum) -> int | None:
    """The step in the run's folder `best`, or None where there is none that is whole."""
    path = run / BEST
    head = read_head(disk, path, checksum) if is_complete(disk, path, checksum) else None
    return None if head is None else head.step


class SnapshotWriter:
    """A snapshot under way: chunks in any order, then `seal`, when the commit that it is of has been made.

    Args:
        store: of the run.
        target: what `seal` names it, replacing what is there.

    Raises:
        DiskError: it does not fit; nothing is left behind.
    """

    def __init__(self, store: StateStore, target: Path) -> None:
        self._store, self._target = store, target
        self._disk = store.disk
        self._layout = store.layout.with_slots(1)
        self._temporary = target.with_name(target.name + ".tmp")
        self._handle: Handle | None = None
        if self._disk.exists(self._temporary):
            remove_folder(self._disk, self._temporary)
        self._disk.make_folder(self._temporary)
        try:
            self._disk.create(self._temporary / STATE_NAME, self._layout.bytes)
            self._handle = self._disk.open(self._temporary / STATE_NAME, write=True)
        except DiskError:
            self.abandon()
            raise

    def write_many(self, block: int, chunks: Sequence[tuple[int, memoryview]]) -> None:
        """Write the start of each buffer as a chunk: (index, buffer) each, the bytes that the run stores for
        this commit."""
        spans = [span_of(self._layout, block, 0, index, buffer) for index, buffer in chunks]
        self._disk.write_summed(self._open(), spans, None)

    def seal(self) -> Path:
        """Make it durable under its name. All chunks have been written, and the store's last commit is
        the one that holds these bytes.

        Returns:
            The folder.

        Raises:
            DiskError: it is not there; nothing of it is left behind.
        """
        head = self._store.head
        if head is None:
            raise RuntimeError("nothing has been committed")
        disk, temporary, target = self._disk, self._temporary, self._target
        try:
            disk.sync(self._open())
            record = seal(_single_slot(head, self._layout), self._store.checksum)
            disk.write_bytes(temporary / HEAD_NAME, encode(record))
            disk.sync_file(temporary / HEAD_NAME)
            disk.sync_folder(temporary)
        except DiskError:
            self.abandon()
            raise
        self.close()
        if disk.exists(target):
            remove_snapshot(disk, target)
        disk.rename(temporary, target)
        disk.sync_folder(target.parent)
        return target

    def abandon(self) -> None:
        """It will not be finished: nothing of it is left behind."""
        self.close()
        if self._disk.exists(self._temporary):
            remove_folder(self._disk, self._temporary)

    def close(self) -> None:
        """Let go of the file."""
        if self._handle is not None:
            self._disk.close(self._handle)
            self._handle = None

    def _open(self) -> Handle:
        if self._handle is None:
            raise RuntimeError(f"{self._target}: sealed or abandoned already")
        return self._handle


def _keep(store: StateStore, target: Path, buffer: memoryview, report: Report | None) -> Path:
    with store.reader() as reader:
        writer = SnapshotWriter(store, target)
        layout, done = reader.layout, 0
        total = layout.with_slots(1).bytes
        try:
            for block in range(len(layout.blocks)):
                for index, chunk in enumerate(layout.chunks(block)):
                    reader.read(block, index, buffer)
                    writer.write_many(block, [(index, buffer)])
                    done += chunk.bytes
                    if report:
                        report(done, total)
        except BaseException:
            writer.abandon()
            raise
        return writer.seal()


def snapshots(disk: Disk, run: Path, checksum: Checksum) -> tuple[Path, ...]:
    """Snapshots whose HEAD.json is undamaged and whose state.bin has its size, oldest first."""
    return tuple(path for path in _numbered(disk, run) if is_complete(disk, path, checksum))


def newest(disk: Disk, run: Path, checksum: Checksum) -> Path | None:
    """The last of `snapshots`, or None."""
    found = snapshots(disk, run, checksum)
    return found[-1] if found else None


def rotate(
    disk: Disk, run: Path, keep: int, checksum: Checksum, whole: Collection[Path] = ()
) -> tuple[Path, ...]:
    """Remove all snapshots but the newest `keep` complete ones, and unfinished ones.

    Args:
        whole: snapshots that this process has made or found complete: they are not looked at again.

    Returns:
        What is left, oldest first.
    """
    found = _numbered(disk, run)
    complete = [path for path in found if path in whole or is_complete(disk, path, checksum)]
    kept = tuple(complete[-keep:] if keep else ())
    for path in found:
        if path not in kept:
            remove_snapshot(disk, path)
    for name in disk.list(run):
        if name.endswith(".tmp") and (name == f"{BEST}.tmp" or _NAME.fullmatch(name.removesuffix(".tmp"))):
            remove_folder(disk, run / name)
    return kept


def remove_snapshot(disk: Disk, path: Path) -> None:
    """Remove a snapshot, HEAD.json first so that a half-removed one is not complete."""
    if disk.exists(path / HEAD_NAME):
        disk.remove(path / HEAD_NAME)
    remove_folder(disk, path)


def restore(store: StateStore, path: Path, buffer: memoryview, report: Report | None = None) -> Head:
    """Make a snapshot the run's state, as a commit of its own.

    A crash on the way leaves the run as it was, if its HEAD and state.bin were whole, and
    otherwise damaged, as it was: restore again. The snapshot is only read.

    Args:
        store: of the run, neither loaded nor created.
        buffer: at least one chunk, page-aligned.

    Raises:
        DamagedFile: the snapshot is damaged.
        ConfigError: it is of another model, plane set or dtype.
    """
    with StateReader.open(store.disk, path, store.checksum) as reader:
        if not reader.layout.with_slots(2).same_file(store.layout):
            raise ConfigError(
                f"{path} does not hold the state of this job's model and precision.",
                "use a snapshot of this run",
            )
        try:
            found = store.load()
        except DamagedFile:
            found = None
        if found is None:
            store.recreate_state()
        store.discard(reader.layout.chunk_bytes)
        done, total = 0, reader.layout.bytes
        for block in range(len(reader.layout.blocks)):
            store.begin(block)
            for index, chunk in enumerate(reader.layout.chunks(block)):
                reader.read(block, index, buffer)
                store.write(block, index, buffer)
                done += chunk.bytes
                if report:
                    report(done, total)
            store.end(block)
        kept = {name: getattr(reader.head, name) for name in Progress.model_fields}
        return store.commit(Progress(**kept))


def _numbered(disk: Disk, run: Path) -> list[Path]:
    steps = (_NAME.fullmatch(name) for name in disk.list(run))
    return [snapshot_path(run, step) for step in sorted(int(match[1]) for match in steps if match)]


def is_complete(disk: Disk, path: Path, checksum: Checksum) -> bool:
    """Whether HEAD.json is there and undamaged, and state.bin has its size."""
    try:
        head = read_head(disk, path, checksum)
        return head is not None and disk.size(path / STATE_NAME) == head.layout.bytes
    except (ConfigError, DiskError):
        return False


def _single_slot(head: Head, layout: StateLayout) -> Head:
    blocks = tuple(BlockHead(slot=0, checksums=block.checksums) for block in head.blocks)
    return head.model_copy(update={"layout": layout.record(), "blocks": blocks})
