"""Groups of blocks that have their turns together (packmule.spec.turns)."""

from __future__ import annotations

from collections.abc import Sequence

from packmule.shapes.blocks import Block
from packmule.spec.turns import Turns


def groups_of(blocks: Sequence[Block], turns: Turns) -> tuple[tuple[int, ...], ...]:
    """Indices of the blocks of each group, from the embedding up.

    A layer is never cut: attention, router and experts are trained together. Embedding and head count
    as layers; where they share a weight they are one.
    """
    head = blocks[-1]
    tied = head.shared is not None
    count = 1 + max(block.layer for block in blocks)
    units = [[block.index for block in blocks if block.layer == layer] for layer in range(count)]
    if turns.ends:
        first = [0, head.index] if tied else [0]
        units = [first, *units, *([] if tied else [[head.index]])]
    some = [units[at : at + turns.layers] for at in range(0, len(units), turns.layers)]
    return tuple(tuple(sorted(index for unit in group for index in unit)) for group in some)
