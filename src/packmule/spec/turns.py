"""Turns: which group of blocks each step trains, as pure arithmetic.

HiFT (Liu et al. 2024, arXiv:2401.15207): every step trains the next group; the order is drawn once,
and the learning rate changes only when all groups have had their turn. BAdam (Luo et al. 2024,
arXiv:2404.02827): a group is trained for some steps, its moments starting at zero, then the next; a
random order is drawn anew each time all have had theirs. Whose turn it is follows from the step
alone, so resuming needs no history.
"""

from __future__ import annotations

import hashlib
from typing import Literal, NamedTuple

from pydantic import Field

from packmule.spec.records import Record

Method = Literal["hift", "badam"]
Order = Literal["ascending", "descending", "random"]


class Turns(Record):
    """An active-block schedule."""

    method: Method
    layers: int = Field(default=1, ge=1, description="layers of a group")
    steps: int = Field(default=1, ge=1, description="of a turn; of HiFT always 1")
    order: Order = "ascending"
    ends: bool = Field(default=True, description="whether embedding and head have turns too")


class Turn(NamedTuple):
    """One step's.

    Attributes:
        group: which is trained.
        age: updates that the moments of its blocks have seen, this step's included.
        rate_step: the step whose learning rate holds.
    """

    group: int
    age: int
    rate_step: int


def turn_at(turns: Turns, groups: int, seed: int, step: int) -> Turn:
    """Of step `step` (0 for the first) of a run.

    Args:
        groups: how many there are.
    """
    cycle, place = divmod(step // turns.steps, groups)
    if turns.method == "hift":
        return Turn(_order(turns.order, groups, f"{seed}")[place], cycle + 1, cycle * groups)
    return Turn(_order(turns.order, groups, f"{seed} {cycle}")[place], step % turns.steps + 1, step)


def _order(order: Order, groups: int, seed: str) -> list[int]:
    if order == "random":
        return sorted(range(groups), key=lambda g: hashlib.sha256(f"{seed} {g}".encode()).digest())
    return list(range(groups)) if order == "ascending" else list(reversed(range(groups)))
