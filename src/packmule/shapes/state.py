"""What an update rule keeps of a block: its planes, by one table for planner, engine and files."""

from __future__ import annotations

from dataclasses import dataclass

from packmule.shapes.blocks import Block
from packmule.spec.plan import RuleName


@dataclass(frozen=True)
class RuleState:
    """One rule's state.

    Attributes:
        planes: their names, the master weights first; each is laid out as they are.
    """

    planes: tuple[str, ...]


STATES: dict[RuleName, RuleState] = {
    "adamw": RuleState(("master", "m", "v")),
    "lomo": RuleState(("master",)),
}
"""Rule -> its state."""


def state_bytes(rule: RuleName, block: Block, dtype: str) -> int:
    """Bytes of all planes of a block.

    Args:
        dtype: of the master weights.
    """
    return len(STATES[rule].planes) * block.layout(dtype).bytes
