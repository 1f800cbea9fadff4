"""AdaLomo: LOMO with a rate of each parameter's own (Lv et al. 2024, arXiv:2310.10195, algorithm 1).

The second moment is kept in factors, and the update of a tensor is normalized by its own size and that
of the tensor ("grouped update normalization"). What the paper leaves open is as in its authors' program:
the decay of the moment follows Adafactor (Shazeer and Stern 2018, arXiv:1804.04235, section 7.2),
1 - t^-0.8, and weight decay is scaled as the update is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from packmule.optim.rule import Rule, Update

if TYPE_CHECKING:
    from torch import Tensor

    from packmule.kernels.contract import Kernels

DECAY = 0.8
SQUARE_EPS = 1e-30
"""Added to squares of gradients."""
LEAST_SIZE = 1e-3
"""The root mean square of a tensor counts as this at least."""
MOST_UPDATE = 1.0
"""The root mean square of an update before the learning rate, at most."""


class AdaLomo(Rule):
    """Planes: master; factors: rows and columns of a matrix, all of a vector."""

    def apply(
        self,
        kernels: Kernels,
        update: Update,
        role: str,
        planes: Sequence[Tensor],
        gradient: Tensor,
        weight: Tensor | None,
    ) -> None:
        master, rows, *columns = planes
        kernels.adalomo(
            master,
            rows,
            columns[0] if columns else None,
            gradient,
            weight,
            lr=update.learning_rate,
            decay=1.0 - (update.age or update.step) ** -DECAY,
            eps=SQUARE_EPS,
            least=LEAST_SIZE,
            most=MOST_UPDATE,
            weight_decay=self.decay(role),
            grad_scale=update.factor,
        )
