"""Snapshots: full copies of a commit in folders `checkpoint-N`, for when a run is damaged.

A snapshot is a run folder with one slot per block. It is built under a temporary name and
renamed when all of it is durable, so a folder `checkpoint-N` is whole unless it was damaged
later or is half removed; `newest` passes over those.
"""

from __future__ import annotations

import re
from pathlib import Path

from packmule.checkpoint.head import (
    HEAD_NAME,
    STATE_NAME,
    BlockHead,
    Checksum,
    Head,
    Progress,
    encode,
    read_head,
    seal,
)
from packmule.checkpoint.reader import Report, StateReader
from packmule.checkpoint.store import StateStore
from packmule.errors import ConfigError, DamagedFile, DiskError
from packmule.tiers.disk import Disk, remove_folder

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
    head = read_head(disk, path, checksum) if _complete(disk, path, checksum) else None
    return None if head is None else head.step


def _keep(store: StateStore, target: Path, buffer: memoryview, report: Report | None) -> Path:
    disk = store.disk
    with store.reader() as reader:
        temporary = target.with_name(target.name + ".tmp")
        if disk.exists(temporary):
            remove_folder(disk, temporary)
        disk.make_folder(temporary)
        try:
            _copy(disk, reader, temporary, buffer, report)
            head = seal(_single_slot(reader), store.checksum)
            disk.write_bytes(temporary / HEAD_NAME, encode(head))
            disk.sync_file(temporary / HEAD_NAME)
            disk.sync_folder(temporary)
        except DiskError:
            remove_folder(disk, temporary)
            raise
    if disk.exists(target):
        remove_snapshot(disk, target)
    disk.rename(temporary, target)
    disk.sync_folder(store.folder)
    return target


def snapshots(disk: Disk, run: Path, checksum: Checksum) -> tuple[Path, ...]:
    """Snapshots whose HEAD.json is undamaged and whose state.bin has its size, oldest first."""
    return tuple(path for path in _numbered(disk, run) if _complete(disk, path, checksum))


def newest(disk: Disk, run: Path, checksum: Checksum) -> Path | None:
    """The last of `snapshots`, or None."""
    found = snapshots(disk, run, checksum)
    return found[-1] if found else None


def rotate(disk: Disk, run: Path, keep: int, checksum: Checksum) -> tuple[Path, ...]:
    """Remove all snapshots but the newest `keep` complete ones, and unfinished ones.

    Returns:
        What was removed.
    """
    kept = set(snapshots(disk, run, checksum)[-keep:] if keep else ())
    removed = [path for path in _numbered(disk, run) if path not in kept]
    for path in removed:
        remove_snapshot(disk, path)
    for name in disk.list(run):
        if name.endswith(".tmp") and (name == f"{BEST}.tmp" or _NAME.fullmatch(name.removesuffix(".tmp"))):
            remove_folder(disk, run / name)
    return tuple(removed)


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


def _complete(disk: Disk, path: Path, checksum: Checksum) -> bool:
    try:
        head = read_head(disk, path, checksum)
        return head is not None and disk.size(path / STATE_NAME) == head.layout.bytes
    except (ConfigError, DiskError):
        return False


def _copy(disk: Disk, reader: StateReader, folder: Path, buffer: memoryview, report: Report | None) -> None:
    layout = reader.layout.with_slots(1)
    disk.create(folder / STATE_NAME, layout.bytes)
    handle = disk.open(folder / STATE_NAME, write=True)
    try:
        done = 0
        for block in range(len(layout.blocks)):
            for index, chunk in enumerate(layout.chunks(block)):
                reader.read(block, index, buffer)
                view = buffer.cast("B")[: chunk.bytes]
                disk.write(handle, view, layout.chunk_offset(block, 0, index))
                done += chunk.bytes
                if report:
                    report(done, layout.bytes)
        disk.sync(handle)
    finally:
        disk.close(handle)


def _single_slot(reader: StateReader) -> Head:
    blocks = tuple(BlockHead(slot=0, checksums=block.checksums) for block in reader.head.blocks)
    layout = reader.layout.with_slots(1).record()
    return reader.head.model_copy(update={"layout": layout, "blocks": blocks})
