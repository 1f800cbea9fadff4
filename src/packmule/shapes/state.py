"""What an update rule keeps of a block: its planes, by one table for planner, engine and files."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from packmule.shapes.blocks import Block
from packmule.shapes.layout import PAGE, Layout, TensorSpec, layout, round_up
from packmule.spec.plan import RuleName

FACTORS = "factors"
"""The plane of a second moment in factors: per matrix a value for each row and each column, per vector
one for each element (Shazeer and Stern 2018, arXiv:1804.04235)."""


@dataclass(frozen=True)
class RuleState:
    """One rule's state.

    Attributes:
        planes: their names, the master weights first. Each is laid out as they are, but `FACTORS`.
        whole: an update needs all of a tensor at once.
    """

    planes: tuple[str, ...]
    whole: bool = False


STATES: dict[RuleName, RuleState] = {
    "adamw": RuleState(("master", "m", "v")),
    "lomo": RuleState(("master",)),
    "adalomo": RuleState(("master", FACTORS), whole=True),
}
"""Rule -> its state."""


def plane_layout(plane: str, masters: Layout) -> Layout:
    """How a plane of a block lies.

    Args:
        masters: how its master weights do.
    """
    if plane != FACTORS:
        return masters
    specs = [spec for entry in masters.entries for spec in factors(entry.name, entry.shape, entry.dtype)]
    placed = layout(specs)
    return Layout(placed.entries, placed.align, round_up(placed.bytes, PAGE))


def factors(name: str, shape: tuple[int, ...], dtype: str) -> list[TensorSpec]:
    """What stands for the second moment of a parameter: [rows, columns] of a matrix (what follows its
    first dimension counts as columns), or all of a vector."""
    if len(shape) < 2:
        return [TensorSpec(f"{name}.square", shape, dtype)]
    columns = TensorSpec(f"{name}.columns", (prod(shape[1:]),), dtype)
    return [TensorSpec(f"{name}.rows", shape[:1], dtype), columns]


def state_bytes(rule: RuleName, block: Block, dtype: str) -> int:
    """Bytes of all planes of a block.

    Args:
        dtype: of the master weights.
    """
    masters = block.layout(dtype)
    return sum(plane_layout(plane, masters).bytes for plane in STATES[rule].planes)
