"""`packmule verify`: read all of a run's or a snapshot's state and say what is damaged."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from packmule.checkpoint.reader import Report, StateReader
from packmule.errors import DamagedFile
from packmule.tiers.disk import Checksum, Disk, aligned_buffer


@dataclass(frozen=True)
class Verdict:
    """What reading a folder found.

    Attributes:
        path: the folder.
        kind: a run has two slots per block, a snapshot one; None where HEAD cannot be read.
        step: of its commit; None where HEAD cannot be read.
        checked_bytes: bytes of planes read.
        damage: one sentence per damaged file or chunk; empty if all is well.
    """

    path: Path
    kind: Literal["run", "snapshot"] | None
    step: int | None
    checked_bytes: int
    damage: tuple[str, ...]


def verify(
    disk: Disk,
    path: Path,
    checksum: Checksum,
    buffer: memoryview | None = None,
    report: Report | None = None,
) -> Verdict:
    """Check HEAD.json and every chunk it names.

    Args:
        path: a run folder or a snapshot folder.
        buffer: at least one chunk, page-aligned; made here if None.

    Raises:
        ConfigError: there is no commit in `path`, or it is of an unknown version.
    """
    try:
        reader = StateReader.open(disk, path, checksum)
    except DamagedFile as error:
        return Verdict(path, None, None, 0, (error.cause,))
    with reader:
        layout = reader.layout
        room = aligned_buffer(layout.chunk_bytes) if buffer is None else buffer
        damage: list[str] = []
        done, total = 0, layout.state_bytes
        for block in range(len(layout.blocks)):
            for index, chunk in enumerate(layout.chunks(block)):
                try:
                    reader.read(block, index, room)
                except DamagedFile as error:
                    damage.append(error.cause)
                done += chunk.bytes
                if report:
                    report(done, total)
    kind: Literal["run", "snapshot"] = "run" if layout.slots == 2 else "snapshot"
    return Verdict(path, kind, reader.head.step, done, tuple(damage))
