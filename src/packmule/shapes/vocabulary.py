"""A vocabulary cut into parts: the blocks, and what their bodies keep and borrow.

Embedding and head hold one row per token. Where the vocabulary is cut, some rows each are a block of
their own, so that what must be in RAM at once does not grow with the vocabulary. The embedding's parts
each fill in the tokens whose ids they hold. The head visits the parts twice: first for the log-sum-exp
of every token's logits, then for the gradients, with the logits computed again.

Letters as in docs/design.md, and r rows of a part. `c`, `s` and `p` as in packmule.shapes.bodies.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

from packmule.shapes.blocks import Block, Parameter
from packmule.shapes.layout import TensorSpec

if TYPE_CHECKING:
    from packmule.shapes.bodies import Dtypes

_PART = re.compile(r"(embed|logits)\d+")
_WHOLE = {"embed": "embed", "logits": "head"}


def part_ranges(vocab: int, parts: int) -> tuple[range, ...]:
    """The ids of each part, as equal as can be.

    Raises:
        ValueError: fewer than one part, or more parts than ids.
    """
    if not 1 <= parts <= vocab:
        raise ValueError(f"a vocabulary of {vocab} tokens has no {parts} parts")
    small, more = divmod(vocab, parts)
    starts = [part * small + min(part, more) for part in range(parts + 1)]
    return tuple(range(*pair) for pair in pairwise(starts))


def cut_blocks(blocks: Sequence[Block], parts: int) -> tuple[Block, ...]:
    """A decoder's blocks with its vocabulary in parts.

    Learned positions stay with the last part of the embedding: they are added when all tokens are
    there. What is left of the head is its norm.
    """
    embed, head = blocks[0], blocks[-1]
    found: list[Block] = []

    def add(origin: Block, **changes: object) -> None:
        found.append(replace(origin, index=len(found), shared=None, origin=origin, **changes))  # type: ignore[arg-type]

    def add_parts(origin: Block, kind: str, rest: tuple[Parameter, ...]) -> None:
        table = next(p for p in origin.parameters if p.name == "weight")
        for part, tokens in enumerate(part_ranges(table.shape[0], parts)):
            rows = table._replace(shape=(len(tokens), *table.shape[1:]))
            owned = (rows, *(rest if part == parts - 1 else ()))
            add(origin, name=f"{kind}{part}", kind=kind, parameters=owned, tokens=tokens)

    add_parts(embed, "embed", embed.parameters[1:])
    for block in blocks[1:-1]:
        add(block)
    if head.shared is None:
        add_parts(head, "logits", ())
    add(head, parameters=tuple(p for p in head.parameters if p.name != "weight"))
    return tuple(found)


def whole_name(block: str) -> str:
    """The name that a block of a cut vocabulary has where it is not cut; any other block's own."""
    match = _PART.fullmatch(block)
    return _WHOLE[match[1]] if match else block


def scores(tokens: int, types: Dtypes) -> tuple[TensorSpec, ...]:
    """What the head's first visits gather of every token: the log-sum-exp of its logits and its
    target's logit; the highest logit and whose it is."""
    s = types.statistic
    return (
        TensorSpec("lse", (tokens,), s),
        TensorSpec("target", (tokens,), s),
        TensorSpec("best", (tokens,), s),
        TensorSpec("best_id", (tokens,), "int64"),
    )


def gathered(hidden: int, tokens: int, types: Dtypes) -> tuple[TensorSpec, ...]:
    """The gradient of the normed tokens while the parts add to it: in the wider dtype, so that it is
    rounded once."""
    return (TensorSpec("dnormed", (tokens, hidden), types.statistic),)
