"""The data cursor: which rows a step trains on, and their tokens as micro-batches. No state: a
step's rows follow from (seed, step), so resuming is asking for the next step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from packmule.data.mixes import Mix
from packmule.data.order import ordered, permute
from packmule.data.rows import Rows
from packmule.data.store import TokenStore
from packmule.spec.batch import IGNORED, Batch


class Batches:
    """Rows in a seeded order per epoch, read as needed.

    Args:
        store: where the tokens are.
        rows: the row set that is trained or evaluated on.
        seed: of the order.
    """

    def __init__(self, store: TokenStore, rows: Rows, seed: int) -> None:
        self.store, self.rows, self.seed = store, rows, seed
        groups = rows.meta.groups
        self._mix = Mix([group.weight for group in groups]) if len(groups) > 1 else None
        self._sizes = np.array([group.rows for group in groups], np.int64)

    def row_ids(self, step: int, rows_per_step: int) -> tuple[int, ...]:
        """The rows of a step (counted from 0), in the order they are trained on.

        The cursor is step * rows_per_step; an epoch ends inside a step without a gap, and each
        row is used once per epoch.
        """
        return self.row_ids_at(step * rows_per_step, rows_per_step)

    def row_ids_at(self, cursor: int, count: int) -> tuple[int, ...]:
        """The `count` rows from global position `cursor` on."""
        if self._mix is not None:
            return self._mixed(self._mix, np.arange(cursor, cursor + count))
        return ordered(len(self.rows), self.seed, cursor, count)

    def _mixed(self, mix: Mix, places: np.ndarray) -> tuple[int, ...]:
        """The rows at some places of a weighted mix: each source goes through its rows epoch by epoch, in an
        order of its own."""
        source, turn = mix.at(places)
        found = np.empty(len(places), np.int64)
        epoch, index = np.divmod(turn, self._sizes[source])
        for s, e in {*zip(source.tolist(), epoch.tolist(), strict=True)}:
            here = (source == s) & (epoch == e)
            first = int(self._sizes[:s].sum())
            order = permute(index[here], int(self._sizes[s]), self.seed, (s << 40) + e)
            found[here] = first + order
        return tuple(found.tolist())

    def micro_batch(self, row_ids: Sequence[int]) -> Batch:
        """The tokens of some rows as one flat stream of documents, rows in the given order."""
        pieces = [piece for row in row_ids for piece in self.rows.pieces(row)]
        lengths = tuple(length for _, length in pieces)
        total = sum(lengths)
        ids = np.empty(total, np.int64)
        targets = np.empty(total, np.int64)
        positions = np.empty(total, np.int32)
        at = 0
        for start, length in pieces:
            part = slice(at, at + length)
            self.store.read_into(ids[part], start)
            targets[at : at + length - 1] = ids[at + 1 : at + length]
            targets[at + length - 1] = IGNORED
            trained = self.store.trained(start, length)
            if trained is not None:
                targets[at : at + length - 1][~trained[1:]] = IGNORED
            positions[part] = np.arange(length, dtype=np.int32)
            at += length
        return Batch(ids, targets, positions, lengths, tuple(row_ids))

    def targets(self, row_ids: Sequence[int]) -> int:
        """How many tokens of these rows carry loss, without reading tokens."""
        return sum(self.rows.targets(row) for row in row_ids)

    def tokens(self, row_ids: Sequence[int]) -> int:
        """How many tokens these rows hold, without reading them."""
        return int(sum(int(self.rows.lengths(row).sum()) for row in row_ids))
