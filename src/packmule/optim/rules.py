"""Update rules by name."""

from __future__ import annotations

from packmule.optim.adalomo import AdaLomo
from packmule.optim.adamw import AdamW
from packmule.optim.lomo import Lomo
from packmule.optim.rule import Rule
from packmule.spec.plan import OptimizerNumerics, RuleName

RULES: dict[RuleName, type[Rule]] = {"adamw": AdamW, "lomo": Lomo, "adalomo": AdaLomo}
"""Name -> rule; `shapes.state` has their planes."""


def rule_of(numerics: OptimizerNumerics) -> Rule:
    """The rule that a plan's numerics name."""
    return RULES[numerics.rule](numerics)
