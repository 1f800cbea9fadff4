"""AdamW: decoupled weight decay (Loshchilov and Hutter 2019, arXiv:1711.05101, algorithm 2)."""

from __future__ import annotations

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
    """

    step: int
    learning_rate: float
    factor: float = 1.0


@dataclass(frozen=True)
class AdamW:
    """The rule with its hyper-parameters."""

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
            planes: master, m, v: flat, master dtype.
            gradient: flat, gradient dtype; read only.
            weight: flat, compute dtype, receives the new master rounded to it; or None.
        """
        master, m, v = planes
        numbers = self.numerics
        kernels.adamw(
            master,
            m,
            v,
            gradient,
            weight,
            lr=update.learning_rate,
            beta1=numbers.beta1,
            beta2=numbers.beta2,
            eps=numbers.eps,
            weight_decay=self.decay(role),
            step=update.step,
            grad_scale=update.factor,
        )
