"""The header of a safetensors file: where each tensor lies. Nothing is mapped.

Format: huggingface/safetensors README; what its own library refuses is refused here too. Weights are
decoded in packmule.models.weights.
"""

from __future__ import annotations

import json
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

from packmule.data.files import Reader
from packmule.errors import DataError

ITEMSIZE = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1,
            "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1}  # fmt: skip
MAX_HEADER_BYTES = 100_000_000
"""The format's own bound."""
MAX_VALUES = 3_000_000
"""Commas and brackets in a header, an entry has about ten: bounds what parsing it allocates."""
_MAX_DIMENSIONS = 16
_WHOLE = "the file is truncated or damaged; get it again"


class SafeTensor(NamedTuple):
    """One tensor of the file; `offset` counts from the beginning of the file."""

    name: str
    shape: tuple[int, ...]
    type: str
    offset: int
    bytes: int


def read_safetensors(path: Path) -> tuple[dict[str, SafeTensor], int]:
    """Tensors by name, and the header's length in bytes.

    Raises:
        DataError: not safetensors, an unknown dtype, a name that occurs twice, or offsets that do not
            match shapes or file, overlap, or leave holes.
    """
    with Reader(path) as reader:
        if reader.bytes < 8:
            raise DataError(f"{path} is not a safetensors file.", _WHOLE)
        length = int.from_bytes(reader.read(0, 8), "little")
        if length > min(MAX_HEADER_BYTES, reader.bytes - 8):
            raise DataError(
                f"{path}: a header of {length} bytes does not fit the file's {reader.bytes}.", _WHOLE
            )
        text, size = reader.read(8, length), reader.bytes
    header = _parse(path, text)
    header.pop("__metadata__", None)
    start = 8 + length
    tensors = {name: _tensor(path, name, entry, start, size) for name, entry in header.items()}
    _check_cover(path, tensors, start, size)
    return tensors, start


def _parse(path: Path, text: bytes) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict[str, Any]()
        for name, value in pairs:
            if name in found:
                raise DataError(f"{path}: the safetensors header has {name!r:.80} twice.", _WHOLE)
            found[name] = value
        return found

    if sum(map(text.count, (b",", b"[", b"{"))) > MAX_VALUES:
        raise DataError(f"{path}: the safetensors header has more than {MAX_VALUES:,} values.", _WHOLE)
    try:
        header = json.loads(text, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: the safetensors header is not JSON: {error}.", _WHOLE) from None
    if not isinstance(header, dict):
        raise DataError(f"{path}: the safetensors header is no JSON object.", _WHOLE)
    return header


def _tensor(path: Path, name: str, entry: Any, start: int, size: int) -> SafeTensor:
    found: dict[str, Any] = entry if isinstance(entry, dict) else {}
    kind, shape, offsets = (found.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not (isinstance(kind, str) and _counts(shape) and _counts(offsets) and len(offsets) == 2):
        raise DataError(f"{path}: the header entry of {name!r:.80} is malformed.", _WHOLE)
    begin, end = offsets
    if kind not in ITEMSIZE:
        raise DataError(
            f"{path}: tensor {name!r:.80} has the unknown dtype {kind!r:.80}.",
            "save the model as F32, F16 or BF16",
        )
    if end - begin != prod(shape) * ITEMSIZE[kind]:
        raise DataError(
            f"{path}: tensor {name!r:.80}: offsets {begin} to {end} do not match {kind} {list(shape)}.",
            _WHOLE,
        )
    if start + end > size:
        raise DataError(
            f"{path}: tensor {name!r:.80} ends at byte {start + end}, but the file ends at {size}.", _WHOLE
        )
    return SafeTensor(name, tuple(shape), kind, start + begin, end - begin)


def _counts(value: Any) -> TypeGuard[list[int]]:
    """Whether a value is a short list of integers from 0 on. JSON's true is no integer here."""
    return (
        isinstance(value, list)
        and len(value) <= _MAX_DIMENSIONS
        and all(type(n) is int and 0 <= n < 1 << 63 for n in value)
    )


def _check_cover(path: Path, tensors: dict[str, SafeTensor], start: int, size: int) -> None:
    """Tensors lie one after the other and fill the file, as the format demands."""
    placed = sorted(tensors.values(), key=lambda tensor: (tensor.offset, tensor.bytes))
    for before, after in pairwise(placed):
        if before.offset + before.bytes > after.offset:
            raise DataError(f"{path}: tensors {before.name!r:.80} and {after.name!r:.80} overlap.", _WHOLE)
    filled = sum(tensor.bytes for tensor in placed)
    if filled != size - start:
        raise DataError(
            f"{path}: its tensors have {filled} bytes, but {size - start} follow the header.", _WHOLE
        )
