"""HEAD.json: the record that says which bytes of `state.bin` are the run's state.

Its last field is a CRC32C of the whole file with that field's eight digits set to zero, so
any changed byte is found. Nothing here writes `state.bin`.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from packmule.checkpoint.layout import LayoutRecord, StateLayout
from packmule.errors import ConfigError, DamagedFile
from packmule.spec.plan import Numerics
from packmule.spec.records import Record
from packmule.tiers.disk import Checksum, Disk

FORMAT = 1
HEAD_NAME = "HEAD.json"
STATE_NAME = "state.bin"

_UNSUMMED = "00000000"
_TAIL = re.compile(rb'"checksum": "([0-9a-f]{8})"\n\}\n\Z')
_SNAPSHOT_HINT = "go back to the newest snapshot (folder checkpoint-N of the run)"


class Progress(Record):
    """What a commit stores besides the planes."""

    step: int = Field(ge=0, description="optimizer steps the planes have seen")
    cursor: int = Field(ge=0, description="rows consumed since the run began")
    tokens: int = Field(ge=0, description="target tokens trained on since the run began")
    data: str = Field(default="", description="which row set is trained on, named by its content")
    data_cursor: int = Field(default=0, ge=0, description="rows consumed before this row set's first")
    data_tokens: int = Field(default=0, ge=0, description="target tokens of these")
    numerics: Numerics
    job_hash: str = Field(description="of the resolved job, as config.yaml holds it")
    model: dict[str, Any] = Field(description="the model's config.json")


class BlockHead(Record):
    """One block's current slot and, per plane, its chunks' CRC32Cs, 8 hex digits each."""

    slot: int = Field(ge=0, le=1)
    checksums: tuple[Annotated[str, Field(pattern="^[0-9a-f]*$")], ...]


class Head(Progress):
    """One commit."""

    format: int = FORMAT
    layout: LayoutRecord
    blocks: tuple[BlockHead, ...]
    checksum: str = _UNSUMMED


def seal(head: Head, checksum: Checksum) -> Head:
    """The same commit with the checksum that fits it."""
    data = head.model_copy(update={"checksum": _UNSUMMED}).to_json().encode()
    return head.model_copy(update={"checksum": f"{checksum(memoryview(data)):08x}"})


def encode(head: Head) -> bytes:
    """The bytes of HEAD.json, of a sealed commit."""
    return head.to_json().encode()


def decode(data: bytes, path: Path, checksum: Checksum) -> Head:
    """Read HEAD.json's bytes.

    Raises:
        DamagedFile: they are not what was written.
        ConfigError: they are of an unknown version, or break a rule of the format.
    """
    try:
        start = _tail(data)
    except ValueError:
        raise DamagedFile(f"{path} does not end in its checksum.", _SNAPSHOT_HINT) from None
    stored = data[start : start + 8]
    summed = data[:start] + _UNSUMMED.encode() + data[start + 8 :]
    computed = f"{checksum(memoryview(summed)):08x}"
    if stored.decode() != computed:
        raise DamagedFile(
            f"{path} does not match its checksum: stored {stored.decode()}, computed {computed}.",
            _SNAPSHOT_HINT,
        )
    try:
        text = data.decode()
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise ConfigError(f"{path} holds no JSON object.", _SNAPSHOT_HINT)
    version = found.get("format")
    if version != FORMAT:
        raise ConfigError(
            f"{path}: format {version!r:.40} is not known; this version reads format {FORMAT}.",
            "use the version of packmule that wrote it, or a newer one",
        )
    head = Head.parse_json(text, str(path))
    _check_blocks(head, path)
    return head


def read_head(disk: Disk, folder: Path, checksum: Checksum) -> Head | None:
    """The commit in a run or snapshot folder, or None where there is none.

    Raises: as `decode`.
    """
    path = folder / HEAD_NAME
    if not disk.exists(path):
        return None
    return decode(disk.read_bytes(path), path, checksum)


def state_layout(head: Head, path: Path) -> StateLayout:
    """The layout HEAD describes."""
    return StateLayout.from_record(head.layout, str(path))


def _tail(data: bytes) -> int:
    match = _TAIL.search(data[-40:])
    if match is None:
        raise ValueError("no checksum")
    return len(data) - len(data[-40:]) + match.start(1)


def _check_blocks(head: Head, path: Path) -> None:
    layout = state_layout(head, path)
    digits = [
        tuple(8 * layout.pieces(block, plane) for plane in range(len(layout.planes)))
        for block in range(len(layout.blocks))
    ]
    stored = [tuple(len(text) for text in block.checksums) for block in head.blocks]
    if stored != digits or any(block.slot >= layout.slots for block in head.blocks):
        raise ConfigError(
            f"{path}: `blocks` does not fit `layout`.",
            "the file was written by another program; see docs/formats.md",
        )
