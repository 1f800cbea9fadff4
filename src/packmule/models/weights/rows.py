"""Flat chunks of a matrix regrouped into whole rows, and rows picked out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import numpy as np

from packmule.shapes.model import Block, Parameter

Tensors = Callable[[Block, Parameter], Iterable[np.ndarray]]
"""Gives a parameter's elements in order, as flat float32 or float64 chunks."""


def whole_rows(chunks: Iterable[np.ndarray], columns: int, unit: int = 1) -> Iterator[np.ndarray]:
    """Flat chunks regrouped into [n * unit, columns]; what is left of one waits for the next.

    Raises:
        ValueError: the elements do not fill whole units.
    """
    left: np.ndarray | None = None
    for chunk in chunks:
        values = chunk if left is None else np.concatenate((left, chunk))
        whole = len(values) - len(values) % (unit * columns)
        left = values[whole:].copy()
        if whole:
            yield values[:whole].reshape(-1, columns)
    if left is not None and len(left):
        raise ValueError(f"{len(left)} elements are left over of rows of {columns}")


def vocabulary_rows(tensors: Tensors, kept: np.ndarray) -> Tensors:
    """The same tensors with only the rows `kept` (ascending ids) of embedding and head."""

    def chosen(block: Block, parameter: Parameter) -> Iterable[np.ndarray]:
        chunks = tensors(block, parameter)
        if block.kind not in ("embed", "head") or parameter.name != "weight":
            return chunks
        return _picked(whole_rows(chunks, parameter.shape[-1]), kept)

    return chosen


def _picked(parts: Iterable[np.ndarray], kept: np.ndarray) -> Iterator[np.ndarray]:
    first = 0
    for rows in parts:
        low, high = np.searchsorted(kept, (first, first + len(rows)))
        if high > low:
            yield rows[kept[low:high] - first].reshape(-1)
        first += len(rows)
