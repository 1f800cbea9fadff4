"""How named tensors share one buffer. One layout serves the planner (its bytes), the engine
(its views) and the files (its offsets), so the three cannot disagree."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

PAGE = 4096
LINE = 64

ITEMSIZE = {"float64": 8, "float32": 4, "bfloat16": 2, "int64": 8, "int32": 4}


class TensorSpec(NamedTuple):
    """A tensor to be placed: dtype is one of ITEMSIZE's names."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def bytes(self) -> int:
        return self.numel * ITEMSIZE[self.dtype]


class Entry(NamedTuple):
    """A placed tensor: `offset` and `bytes` within the buffer."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    offset: int
    bytes: int


@dataclass(frozen=True)
class Layout:
    """Tensors one after the other, each on an `align` boundary; `bytes` is rounded up to it."""

    entries: tuple[Entry, ...]
    align: int
    bytes: int

    def __getitem__(self, name: str) -> Entry:
        return next(entry for entry in self.entries if entry.name == name)


def round_up(value: int, align: int) -> int:
    """The least multiple of `align` that is at least `value`."""
    return -(-value // align) * align


def layout(tensors: Iterable[TensorSpec], align: int = LINE) -> Layout:
    """Place tensors in order."""
    entries, offset = [], 0
    for tensor in tensors:
        entries.append(Entry(tensor.name, tensor.shape, tensor.dtype, offset, tensor.bytes))
        offset = round_up(offset + tensor.bytes, align)
    return Layout(tuple(entries), align, offset)
