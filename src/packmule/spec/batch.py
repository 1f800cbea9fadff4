"""One micro-batch of packed documents. Plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

IGNORED = -100
"""The target of a token that carries no loss."""


@dataclass(frozen=True)
class Batch:
    """N tokens of several documents, one after the other, no padding.

    Attributes:
        ids: int64 [N], token ids.
        targets: int64 [N], the id to predict at each position, or IGNORED. Each document's
            last token has none.
        positions: int32 [N], 0.. within each document.
        lengths: tokens of each document, summing to N. Attention never crosses documents.
        rows: ids of the rows this micro-batch is made of, for traces.
    """

    ids: np.ndarray
    targets: np.ndarray
    positions: np.ndarray
    lengths: tuple[int, ...]
    rows: tuple[int, ...] = ()

    @property
    def tokens(self) -> int:
        """N."""
        return len(self.ids)
