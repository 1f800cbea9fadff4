"""TextSubject: a decoder, and prepared text. Which kind of subject a run has is decided here."""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from packmule.checkpoint.reader import StateReader
from packmule.data.batches import Batches
from packmule.data.prepared import ValidationSet, open_data
from packmule.data.tokenizer import TextTokenizer
from packmule.kernels.contract import Kernels
from packmule.models.weights.export import ExportDtype, export_bytes, write_huggingface
from packmule.models.weights.rows import Tensors
from packmule.models.weights.source import WeightSource
from packmule.spec.plan import Plan
from packmule.tiers.disk import Disk
from packmule.train.folder import RunFolder
from packmule.train.look import EvaluationSet, Reading, token_bytes_of
from packmule.train.messages import Request
from packmule.train.subject import StepRows, Subject
from packmule.train.transfer import RunSource, Source

if TYPE_CHECKING:
    pass


class TextSubject(Subject):
    """A decoder, and prepared text.

    Args:
        request: what the parent asks for.
        folder: the run.
        plan: of the run.
    """

    def __init__(self, request: Request, folder: RunFolder, plan: Plan) -> None:
        self._request, self._folder, self._plan = request, folder, plan
        self._shape = folder.decoder_shape().balanced(plan.numerics.router_aux_loss_coef)
        self.shape = self._shape.cut(plan.numerics.vocabulary_parts)
        self.record = folder.model_config()
        self._data = open_data(Path(request.data))
        tokenizer = TextTokenizer.from_folder(folder.model) if request.sample_ids else None
        known = token_bytes_of(folder) if self._data.validation else None
        self.reading = Reading(tuple(map(_evaluation_set, self._data.validation)), tokenizer, known)

    @cached_property
    def _rows(self) -> Batches:
        return Batches(self._data.store, self._data.train, self._plan.numerics.seed)

    @property
    def modules(self) -> None:
        return None

    def step(self, cursor: int, cut: tuple[int, ...]) -> StepRows:
        ids = self._rows.row_ids_at(cursor, sum(cut))
        batches, start = [], 0
        for count in cut:
            batches.append(self._rows.micro_batch(ids[start : start + count]))
            start += count
        return StepRows(ids, batches, self._rows.targets(ids))

    def source(self, disk: Disk, kernels: Kernels) -> AbstractContextManager[Source]:
        if self._request.weights:
            return RunSource(StateReader.open(disk, Path(self._request.weights), kernels.crc32c))
        return WeightSource.open(self._folder.model)

    @property
    def _dtype(self) -> ExportDtype:
        return "float32" if self._plan.numerics.precision != "bf16-mixed" else "bfloat16"

    @property
    def export_bytes(self) -> int:
        return export_bytes(self._shape, self._dtype)

    def export(self, folder: Path, tensors: Tensors) -> None:
        model = self._folder.model
        write_huggingface(folder, self._shape, self.record, tensors, self._dtype, model)


def _evaluation_set(part: ValidationSet) -> EvaluationSet:
    batches = Batches(part.store, part.rows, 0)

    def batch(first: int, count: int) -> Any:
        return batches.micro_batch(tuple(range(first, first + count)))

    return EvaluationSet(part.name, batch)


def open_subject(request: Request, folder: RunFolder, plan: Plan) -> Subject:
    """What a run trains."""
    if folder.module_shape() is None:
        return TextSubject(request, folder, plan)
    from packmule.train.module_subject import ModuleSubject

    return ModuleSubject(request, folder, plan)
