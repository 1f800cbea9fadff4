"""The header of a safetensors file: where each tensor lies. Nothing is mapped.

Format: huggingface/safetensors README. Weights are decoded in packmule.models.weights.
"""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from packmule.data.files import Reader
from packmule.errors import DataError

ITEMSIZE = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1,
            "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1}  # fmt: skip
MAX_HEADER_BYTES = 100_000_000
"""The format's own bound."""
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
        DataError: not safetensors, an unknown dtype, or offsets that do not match shapes or file.
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
    try:
        header = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: the safetensors header is not JSON: {error}.", _WHOLE) from None
    if not isinstance(header, dict):
        raise DataError(f"{path}: the safetensors header is no JSON object.", _WHOLE)
    header.pop("__metadata__", None)
    start = 8 + length
    return {name: _tensor(path, name, entry, start, size) for name, entry in header.items()}, start


def _tensor(path: Path, name: str, entry: Any, start: int, size: int) -> SafeTensor:
    try:
        kind, shape = str(entry["dtype"]), tuple(int(n) for n in entry["shape"])
        begin, end = (int(n) for n in entry["data_offsets"])
    except (KeyError, TypeError, ValueError):
        raise DataError(f"{path}: the header entry of {name!r} is malformed.", _WHOLE) from None
    if kind not in ITEMSIZE:
        raise DataError(
            f"{path}: tensor {name!r} has the unknown dtype {kind!r}.", "save the model as F32, F16 or BF16"
        )
    if min((begin, *shape), default=0) < 0 or end - begin != prod(shape) * ITEMSIZE[kind]:
        raise DataError(
            f"{path}: tensor {name!r}: offsets {begin} to {end} do not match {kind} {list(shape)}.", _WHOLE
        )
    if start + end > size:
        raise DataError(
            f"{path}: tensor {name!r} ends at byte {start + end}, but the file ends at {size}.", _WHOLE
        )
    return SafeTensor(name, shape, kind, start + begin, end - begin)
