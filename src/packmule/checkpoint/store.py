"""The state of a run on disk: two slots per block, updated block by block, committed whole.

The rule that makes every commit safe: a slot that HEAD names is never written. An update
goes to the block's other slot when HEAD names the current one, and in place otherwise.
Decides nothing about when to update or commit.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from itertools import islice
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
    state_layout,
)
from packmule.checkpoint.layout import StateLayout
from packmule.checkpoint.reader import (
    Place,
    Report,
    StateReader,
    checksums_of,
    chunk_damage,
    open_state,
    read_places,
    span_of,
)
from packmule.errors import ConfigError, DamagedFile, DiskError
from packmule.kernels.transfers import Span
from packmule.tiers.disk import Checksum, Disk, Handle, ensure_folder, replace_file


class StateStore:
    """The planes of every block, as chunks that can be read, updated and committed.

    Calls may come from several threads; two calls on the same chunk must be ordered by the
    caller, and a commit raises while an update is under way. Misuse (an update that is not
    complete, an unknown chunk) is a RuntimeError: a bug, not a fault of the user or the disk.

    Attributes:
        disk, folder, checksum: as given.
        layout: as given; after `load` its `chunk_bytes` are those of HEAD.
        head: the last commit, None before the first.
    """

    def __init__(self, disk: Disk, folder: Path, layout: StateLayout, checksum: Checksum) -> None:
        self.disk = disk
        self.folder = folder
        self.layout = layout
        self.checksum = checksum
        self.head: Head | None = None
        self._lock = threading.Lock()
        self._handle: Handle | None = None
        self._failure: DiskError | None = None
        self._slots = [0 for _ in layout.blocks]
        self._kept: tuple[list[int], list[list[int]]] | None = None
        self._written: list[bool] = []
        self._checksums: list[list[int]] = []
        self._updates: dict[int, _Update] = {}
        self.discard(layout.chunk_bytes)

    def create_files(self) -> None:
        """Allocate `state.bin` for a run that has no commit. Write every block, then commit.

        Raises:
            DiskError: it does not fit.
            ConfigError: the run has a commit already.
        """
        if self.disk.exists(self.folder / HEAD_NAME):
            raise ConfigError(f"{self.folder} already holds a run.", "resume it or use another folder")
        ensure_folder(self.disk, self.folder)
        self.recreate_state()

    def recreate_state(self) -> None:
        """Allocate `state.bin` anew whatever is there; HEAD, if any, is damaged from here on."""
        path = self.folder / STATE_NAME
        self.close()
        if self.disk.exists(path):
            self.disk.remove(path)
        self.disk.create(path, self.layout.bytes)
        # HEAD must never be durable without the name of the file it describes.
        self.disk.sync_folder(self.folder)
        self._handle = self.disk.open(path, write=True)

    def discard(self, chunk_bytes: int) -> None:
        """Drop the current contents: every block must be written before the next commit, in
        chunks of `chunk_bytes`. The last commit stays whole until then."""
        with self._lock:
            self.layout = self.layout.with_chunk_bytes(chunk_bytes)
            blocks = range(len(self.layout.blocks))
            self._written = [False for _ in blocks]
            self._checksums = [[0] * len(self.layout.chunks(block)) for block in blocks]
            self._updates.clear()

    def load(self) -> Head | None:
        """Take up the last commit; None where there is none. Reads no planes: see `verify`.

        Raises:
            DamagedFile: HEAD.json or the size of state.bin is not what was written.
            ConfigError: the state is of another model, plane set or dtype.
        """
        head = read_head(self.disk, self.folder, self.checksum)
        if head is None:
            return None
        # The process that wrote this HEAD may have died before its last sync. Were the rename
        # then lost with the power, the older HEAD would name slots that we are about to write.
        self.disk.sync_folder(self.folder)
        found = state_layout(head, self.folder / HEAD_NAME)
        if not found.same_file(self.layout):
            raise ConfigError(
                f"{self.folder / HEAD_NAME}: {_difference(found, self.layout)}.",
                "resume with the model and precision the run began with, or use another folder",
            )
        handle = open_state(self.disk, self.folder, found, write=True)
        self.close()
        self.layout = found
        self.head = head
        self._handle = handle
        self._slots = [block.slot for block in head.blocks]
        self._written = [True for _ in head.blocks]
        self._checksums = checksums_of(head, found)
        self._keep()
        return head

    def begin(self, block: int) -> int:
        """Start an update of a block.

        Returns:
            The slot that is written: the other one if HEAD names the current one.
        """
        with self._lock:
            self._check_usable()
            if block in self._updates:
                raise RuntimeError(f"block {block} is being updated already")
            current = self._slots[block]
            named = self.head is not None and self.head.blocks[block].slot == current
            update = _Update(1 - current if named else current, len(self.layout.chunks(block)))
            self._updates[block] = update
            return update.slot

    def write(self, block: int, index: int, buffer: memoryview) -> None:
        """Write the start of `buffer` as chunk `index` of the update under way.

        Raises:
            DiskError: the update stays incomplete and the last commit is good.
        """
        self.write_many(block, [(index, buffer)])

    def write_many(
        self, block: int, chunks: Sequence[tuple[int, memoryview]], sums: Sequence[int | None] = ()
    ) -> list[int]:
        """As `write`, of several chunks: (index, buffer) each; what each sums to.

        Args:
            sums: where that is known: it is not taken again.
        """
        known = sums or [None] * len(chunks)
        with self._lock:
            update = self._updates[block]
            layout, handle = self.layout, self._open()
        vouched: list[Span] = []
        others: list[Span] = []
        for (index, buffer), value in zip(chunks, known, strict=True):
            span = span_of(layout, block, update.slot, index, buffer)
            (others if value is None else vouched).append(span)
        if vouched:
            self.disk.write_summed(handle, vouched, None)
        taken = iter(self.disk.write_summed(handle, others, self.checksum) if others else ())
        found = [next(taken) if value is None else value for value in known]
        with self._lock:
            for (index, _), value in zip(chunks, found, strict=True):
                update.checksums[index] = value
        return found

    def end(self, block: int) -> None:
        """Finish an update: the slot written becomes the block's current one."""
        with self._lock:
            update = self._updates[block]
            missing = [index for index, value in enumerate(update.checksums) if value is None]
            if missing:
                raise RuntimeError(f"block {block}: chunks {missing[:8]} of the update are not written")
            self._slots[block] = update.slot
            self._checksums[block] = [value for value in update.checksums if value is not None]
            self._written[block] = True
            del self._updates[block]

    def revert(self) -> None:
        """Drop what has been stored since the last commit: every block is what that one says again."""
        with self._lock:
            self._check_usable()
            if self._updates or self._kept is None:
                raise RuntimeError("nothing has been committed, or blocks are being updated")
            slots, checksums = self._kept
            self._slots, self._checksums = list(slots), list(checksums)

    def _keep(self) -> None:
        """What the last commit is made of. A list of checksums is replaced, never changed."""
        self._kept = list(self._slots), list(self._checksums)

    def cancel(self) -> None:
        """Forget updates under way: their blocks are as they were before."""
        with self._lock:
            self._updates.clear()

    def read(self, block: int, index: int, buffer: memoryview, verify: bool = True) -> None:
        """Fill the start of `buffer` with the newest bytes of a chunk: those of the update under
        way if it has written the chunk, else those from before it.

        Raises:
            DamagedFile: names block, plane and chunk (only if `verify`).
        """
        self.read_many(block, [(index, buffer)], verify)

    def read_many(
        self, block: int, chunks: Sequence[tuple[int, memoryview]], verify: bool = True
    ) -> list[Place]:
        """As `read`, of several chunks: (index, buffer) each; where they were and what they should sum to."""
        with self._lock:
            layout, handle = self.layout, self._open()
            places = [self._place(block, index) for index, _ in chunks]
        read_places(
            self.disk, handle, self.folder, layout, places, [b for _, b in chunks], self.checksum, verify
        )
        return places

    def damage(self, place: Place, found: int) -> DamagedFile:
        """The error for a chunk that was read unverified and sums to `found`."""
        return chunk_damage(self.folder / STATE_NAME, self.layout, place, found)

    def _place(self, block: int, index: int) -> Place:
        """Where a chunk's newest bytes are. Caller holds the lock."""
        update = self._updates.get(block)
        newer = update.checksums[index] if update else None
        if update and newer is not None:
            return Place(block, update.slot, index, newer)
        if not self._written[block]:
            raise RuntimeError(f"block {block} has never been written")
        return Place(block, self._slots[block], index, self._checksums[block][index])

    def commit(self, progress: Progress) -> Head:
        """Make the current slots the run's durable state.

        Every write must have returned. When this returns, a crash at any later moment finds
        this commit or a newer one. After a failure the store refuses further use, because what
        a failed sync kept is unknown; the run resumes from the last good commit.

        Raises:
            DiskError: the disk is full, or a sync failed.
        """
        with self._lock:
            self._check_usable()
            if self._updates:
                raise RuntimeError(f"commit while blocks {sorted(self._updates)} are being updated")
            if not all(self._written):
                raise RuntimeError("commit before every block has been written")
            head = seal(self._next_head(progress), self.checksum)
            try:
                self.disk.sync(self._open())
                replace_file(self.disk, self.folder / HEAD_NAME, encode(head))
            except DiskError as error:
                self._failure = error
                raise
            self.head = head
            self._keep()
            return head

    def verify(self, buffer: memoryview, report: Report | None = None) -> None:
        """Read every current chunk through `buffer` (at least `layout.chunk_bytes`).

        Raises:
            DamagedFile: the first damage, naming file, block, plane and chunk.
        """
        done, total = 0, self.layout.state_bytes
        for block in range(len(self.layout.blocks)):
            for index, chunk in enumerate(self.layout.chunks(block)):
                self.read(block, index, buffer)
                done += chunk.bytes
                if report:
                    report(done, total)

    def rechunk(self, chunk_bytes: int, buffer: memoryview, report: Report | None = None) -> None:
        """Verify every current chunk and go on with another chunk size from here.

        Args:
            buffer: holds the larger of the old and the new chunk.

        Raises:
            DamagedFile: as `verify`.
        """
        layout = self.layout.with_chunk_bytes(chunk_bytes)
        span = self.layout.with_chunk_bytes(max(chunk_bytes, self.layout.chunk_bytes))
        sums: list[list[int]] = []
        done, total = 0, layout.state_bytes
        for block in range(len(layout.blocks)):
            sums.append([])
            old = 0
            for whole in span.chunks(block):
                view = buffer.cast("B")[: whole.bytes]
                for start in range(0, whole.bytes, self.layout.chunk_bytes):
                    self.read(block, old, view[start:])
                    old += 1
                for start in range(0, whole.bytes, chunk_bytes):
                    sums[block].append(self.checksum(view[start : start + chunk_bytes]))
                done += whole.bytes
                if report:
                    report(done, total)
        with self._lock:
            if self._updates:
                raise RuntimeError("rechunk while blocks are being updated")
            self.layout, self._checksums = layout, sums
            self._keep()

    def reader(self) -> StateReader:
        """The last commit, read-only, whatever has been updated since."""
        if self.head is None:
            raise RuntimeError("nothing has been committed")
        return StateReader(self.disk, self.folder, self.head, self.checksum)

    def close(self) -> None:
        """Let go of the file; uncommitted updates are lost."""
        if self._handle is not None:
            self.disk.close(self._handle)
            self._handle = None

    def _open(self) -> Handle:
        if self._handle is None:
            raise RuntimeError("the store has no files open: create_files or load first")
        return self._handle

    def _check_usable(self) -> None:
        if self._failure is not None:
            raise DiskError(
                f"{self.folder}: an earlier commit failed: {self._failure.cause}",
                "run the same command again: it resumes from the last good commit",
            )

    def _next_head(self, progress: Progress) -> Head:
        blocks = []
        for number, sums in enumerate(self._checksums):
            rest = iter(sums)
            counts = (self.layout.pieces(number, plane) for plane in range(len(self.layout.planes)))
            planes = [list(islice(rest, count)) for count in counts]
            texts = tuple("".join(f"{value:08x}" for value in plane) for plane in planes)
            blocks.append(BlockHead(slot=self._slots[number], checksums=texts))
        # Field by field: a Head is a Progress too, and its own commit must not leak through.
        kept = {name: getattr(progress, name) for name in Progress.model_fields}
        return Head(**kept, layout=self.layout.record(), blocks=tuple(blocks))


class _Update:
    """One block's update under way: where it goes and the sums of the chunks written."""

    def __init__(self, slot: int, chunks: int) -> None:
        self.slot = slot
        self.checksums: list[int | None] = [None] * chunks


def _difference(found: StateLayout, wanted: StateLayout) -> str:
    if found.planes != wanted.planes:
        return f"the planes are {', '.join(found.planes)}; this job needs {', '.join(wanted.planes)}"
    if found.dtype != wanted.dtype:
        return f"the state is {found.dtype}; this job needs {wanted.dtype}"
    if found.slots != wanted.slots:
        return "this is a snapshot, not a run"
    names = [block.name for block in found.blocks], [block.name for block in wanted.blocks]
    if names[0] != names[1]:
        return f"the state has {len(names[0])} blocks; this job's model has {len(names[1])}, or other names"
    differing = next(a.name for a, b in zip(found.blocks, wanted.blocks, strict=True) if a != b)
    return f"block {differing} has other tensors than this job's model"
