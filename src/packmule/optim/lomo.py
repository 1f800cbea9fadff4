"""LOMO: stochastic gradient descent fused with backward (Lv et al. 2023, arXiv:2306.09782).

The rule keeps nothing but the master weights. That a gradient is used up as soon as it is there
is the plan's matter (`update: on-backward`), and so is clipping by two passes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from packmule.optim.rule import Rule, Update

if TYPE_CHECKING:
    from torch import Tensor

    from packmule.kernels.contract import Kernels


class Lomo(Rule):
    """Planes: master."""

    def apply(
        self,
        kernels: Kernels,
        update: Update,
        role: str,
        planes: Sequence[Tensor],
        gradient: Tensor,
        weight: Tensor | None,
    ) -> None:
        (master,) = planes
        kernels.sgd(
            master,
            gradient,
            weight,
            lr=update.learning_rate,
            weight_decay=self.decay(role),
            grad_scale=update.factor,
        )
