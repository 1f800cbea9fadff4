"""What every update rule is: a pure update of one tensor, whose planes `shapes.state` declares."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from packmule.spec.plan import OptimizerNumerics

if TYPE_CHECKING:
    from torch import Tensor

    from packmule.kernels.contract import Kernels

VECTORS = frozenset({"norm", "bias"})
"""Roles of one-dimensional parameters."""


@dataclass(frozen=True)
class Update:
    """What one step's updates share.

    Attributes:
        step: 1 for the first.
        learning_rate: of this step.
        factor: multiplies every gradient (the clip factor).
        age: updates that the planes besides the master have seen, this one included; 1: they start
            at zero, whatever they hold. None: one in each step.
        group: the blocks that are updated, by number; None: all.
    """

    step: int
    learning_rate: float
    factor: float = 1.0
    age: int | None = None
    group: int | None = None


@dataclass(frozen=True)
class Rule(ABC):
    """A rule with its hyper-parameters."""

    numerics: OptimizerNumerics

    def decay(self, role: str) -> float:
        """Weight decay of a parameter's role (shapes.model.Role)."""
        numbers = self.numerics
        kept = (
            not numbers.decay_embedding
            if role == "embedding"
            else numbers.decay_on != "all" and role in VECTORS
        )
        return 0.0 if kept else numbers.weight_decay

    @abstractmethod
    def apply(
        self,
        kernels: Kernels,
        update: Update,
        role: str,
        planes: Sequence[Tensor],
        gradient: Tensor,
        weight: Tensor | None,
    ) -> None:
        """Update part of one parameter in place.

        Args:
            planes: of the rule, master first: flat, master dtype.
            gradient: flat, gradient dtype; read only.
            weight: flat, compute dtype, receives the new master rounded to it; or None.
        """
