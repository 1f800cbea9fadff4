"""Subject: what a child trains or judges: text (text_subject), or a user's samples (module_subject)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from packmule.kernels.contract import Kernels
from packmule.models.weights.rows import Tensors
from packmule.shapes.module import Shape
from packmule.tiers.disk import Disk
from packmule.train.look import Reading
from packmule.train.transfer import Source

if TYPE_CHECKING:
    from packmule.models.modules.bodies import ModuleBodies


class StepRows(NamedTuple):
    """What one step is trained on.

    Attributes:
        ids: of its rows, in order.
        batches: one per micro-batch.
        targets: of all of them.
    """

    ids: tuple[int, ...]
    batches: list[Any]
    targets: int


class Subject(ABC):
    """A model and its data.

    Attributes:
        shape: of the model.
        record: of the model, for HEAD.
        reading: what evaluations and samples need.
    """

    shape: Shape
    record: dict[str, Any]
    reading: Reading

    @property
    @abstractmethod
    def modules(self) -> ModuleBodies | None:
        """The user's own, where the model is made of them; built by the first of this and `source`."""

    @abstractmethod
    def step(self, cursor: int, cut: tuple[int, ...]) -> StepRows:
        """The rows from global position `cursor` on.

        Args:
            cut: rows of each micro-batch.
        """

    @abstractmethod
    def source(self, disk: Disk, kernels: Kernels) -> AbstractContextManager[Source]:
        """Where a fresh run's weights come from."""

    @property
    @abstractmethod
    def export_bytes(self) -> int:
        """Of `export`'s weights."""

    @abstractmethod
    def export(self, folder: Path, tensors: Tensors) -> None:
        """Write the trained model."""
