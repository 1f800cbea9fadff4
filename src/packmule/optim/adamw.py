"""AdamW: decoupled weight decay (Loshchilov and Hutter 2019, arXiv:1711.05101, algorithm 2)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from packmule.optim.rule import Rule, Update

if TYPE_CHECKING:
    from torch import Tensor

    from packmule.kernels.contract import Kernels


class AdamW(Rule):
    """Planes: master, m, v."""

    def apply(
        self,
        kernels: Kernels,
        update: Update,
        role: str,
        planes: Sequence[Tensor],
        gradient: Tensor,
        weight: Tensor | None,
    ) -> None:
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
            step=update.age or update.step,
            grad_scale=update.factor,
        )
