"""Reading a committed state: of a run folder or a snapshot folder, verified. Never writes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

from packmule.checkpoint.head import (
    HEAD_NAME,
    STATE_NAME,
    Head,
    read_head,
    state_layout,
)
from packmule.checkpoint.layout import StateLayout
from packmule.errors import ConfigError, DamagedFile
from packmule.kernels.transfers import Span
from packmule.tiers.disk import Checksum, Disk, Handle

Report = Callable[[int, int], None]
"""Called with (bytes done, bytes in all) as a long operation goes on."""


class Place(NamedTuple):
    """One chunk in one slot, and what it should sum to."""

    block: int
    slot: int
    chunk: int
    checksum: int


def checksums_of(head: Head, layout: StateLayout) -> list[list[int]]:
    """HEAD's checksums as [block][chunk]."""
    return [
        [
            int(text[8 * piece : 8 * piece + 8], 16)
            for plane, text in enumerate(block.checksums)
            for piece in range(layout.pieces(number, plane))
        ]
        for number, block in enumerate(head.blocks)
    ]


def chunk_damage(path: Path, layout: StateLayout, place: Place, found: int) -> DamagedFile:
    """The error for a chunk that sums to `found`."""
    chunk = layout.chunks(place.block)[place.chunk]
    start = layout.chunk_offset(place.block, place.slot, place.chunk)
    number = place.chunk - layout.index(place.block, chunk.plane, 0)
    return DamagedFile(
        f"{path}: block {layout.blocks[place.block].name}, plane {layout.planes[chunk.plane]}, "
        f"chunk {number} (bytes {start:,} to {start + chunk.bytes:,} "
        f"of the file) is damaged: checksum stored {place.checksum:08x}, computed {found:08x}.",
        "go back to the newest snapshot; `packmule verify` lists all damage",
    )


def open_state(disk: Disk, folder: Path, layout: StateLayout, write: bool) -> Handle:
    """Open `state.bin` and check its size.

    Raises:
        DamagedFile: it is missing or has another size than `layout` says.
    """
    path = folder / STATE_NAME
    hint = "go back to the newest snapshot"
    if not disk.exists(path):
        raise DamagedFile(f"{path} is missing, but {HEAD_NAME} needs it.", hint)
    size = disk.size(path)
    if size != layout.bytes:
        raise DamagedFile(f"{path} has {size:,} bytes; {HEAD_NAME} needs {layout.bytes:,}.", hint)
    return disk.open(path, write)


def span_of(layout: StateLayout, block: int, slot: int, index: int, buffer: memoryview) -> Span:
    """As many bytes of a buffer as a chunk has, and where that is in the file."""
    size = layout.chunks(block)[index].bytes
    view = buffer.cast("B")[:size]
    if len(view) != size:
        raise RuntimeError(f"block {block} chunk {index}: the buffer has only {len(view)} bytes")
    return Span(view, layout.chunk_offset(block, slot, index))


def read_places(
    disk: Disk,
    handle: Handle,
    folder: Path,
    layout: StateLayout,
    places: Sequence[Place],
    buffers: Sequence[memoryview],
    checksum: Checksum,
    verify: bool,
) -> None:
    """Fill the start of each buffer with the chunk at a place.

    Raises:
        DamagedFile: names the first that does not match (only if `verify`).
    """
    spans = [
        span_of(layout, place.block, place.slot, place.chunk, buffer)
        for place, buffer in zip(places, buffers, strict=True)
    ]
    if not verify:
        disk.read_summed(handle, spans, None)
        return
    for place, found in zip(places, disk.read_summed(handle, spans, checksum), strict=True):
        if found != place.checksum:
            raise chunk_damage(folder / STATE_NAME, layout, place, found)


class StateReader:
    """The state HEAD names, read-only. Use as a context manager, or `close` it.

    While a run is going on in the same process this stays valid between two commits: a
    store never writes to the slots HEAD names.

    Attributes:
        head: the commit.
        layout: of this folder's state.bin; one slot per block in a snapshot.
    """

    def __init__(self, disk: Disk, folder: Path, head: Head, checksum: Checksum) -> None:
        self.head = head
        self.layout = state_layout(head, folder / HEAD_NAME)
        self.folder = folder
        self._disk = disk
        self._checksum = checksum
        self._checksums = checksums_of(head, self.layout)
        self._handle = open_state(disk, folder, self.layout, write=False)

    @classmethod
    def open(cls, disk: Disk, folder: Path, checksum: Checksum) -> Self:
        """Open a run folder or a snapshot folder.

        Raises:
            ConfigError: there is no commit in it, or it is of an unknown version.
            DamagedFile: HEAD.json or the size of state.bin is not what was written.
        """
        head = read_head(disk, folder, checksum)
        if head is None:
            raise ConfigError(
                f"{folder} has no {HEAD_NAME}: nothing has been committed there.",
                "give the folder of a run or of a snapshot (checkpoint-N)",
            )
        return cls(disk, folder, head, checksum)

    def read(self, block: int, index: int, buffer: memoryview, verify: bool = True) -> None:
        """Fill the start of `buffer` with chunk `index` of a block.

        Raises:
            DamagedFile: names block, plane and chunk.
        """
        self.read_many(block, [(index, buffer)], verify)

    def read_many(
        self, block: int, chunks: Sequence[tuple[int, memoryview]], verify: bool = True
    ) -> list[Place]:
        """As `read`, of several chunks: (index, buffer) each; where they were and what they should sum to."""
        slot, sums = self.head.blocks[block].slot, self._checksums[block]
        places = [Place(block, slot, index, sums[index]) for index, _ in chunks]
        buffers = [buffer for _, buffer in chunks]
        read_places(
            self._disk, self._handle, self.folder, self.layout, places, buffers, self._checksum, verify
        )
        return places

    def damage(self, place: Place, found: int) -> DamagedFile:
        """The error for a chunk that was read unverified and sums to `found`."""
        return chunk_damage(self.folder / STATE_NAME, self.layout, place, found)

    def read_plane(self, block: int, plane: str, buffer: memoryview) -> None:
        """Fill the start of `buffer` with a whole plane, verified; tensors lie in it at the
        offsets of `layout.blocks[block].tensors`.

        Raises:
            DamagedFile: names block, plane and chunk.
        """
        number = self.layout.planes.index(plane)
        view = buffer.cast("B")
        for index, chunk in enumerate(self.layout.chunks(block)):
            if chunk.plane == number:
                self.read(block, index, view[chunk.start : chunk.start + chunk.bytes])

    def verify(self, buffer: memoryview, report: Report | None = None) -> None:
        """Read every chunk through `buffer` (at least `layout.chunk_bytes`).

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

    def close(self) -> None:
        """Let go of the file."""
        self._disk.close(self._handle)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
