"""ModuleSubject: a user's own modules, built block by block, and samples of his own data set."""

from __future__ import annotations

from collections.abc import Iterator, Sized
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
import torch
from safetensors.torch import save
from torch import Tensor

from packmule.checkpoint.reader import StateReader
from packmule.errors import ConfigError
from packmule.kernels.contract import Kernels
from packmule.models.modules.bodies import ModuleBodies
from packmule.models.modules.build import Building, Part
from packmule.models.modules.samples import VALIDATION, Samples, open_dataset, split
from packmule.models.weights.export import export_bytes
from packmule.models.weights.module_export import BUFFERS, write_modules
from packmule.models.weights.rows import Tensors
from packmule.shapes.bodies import DTYPES
from packmule.shapes.model import Block, Parameter
from packmule.shapes.module import Shape, TensorRecord
from packmule.spec.plan import Plan
from packmule.tiers.disk import Disk
from packmule.train.folder import HELD_OUT, RunFolder
from packmule.train.look import EvaluationSet, Reading
from packmule.train.memory import trim_malloc
from packmule.train.messages import Request
from packmule.train.modules import RESTORE, difference, import_from
from packmule.train.subject import StepRows, Subject
from packmule.train.transfer import RunSource, Source


class ModuleSubject(Subject):
    """A user's modules and data set.

    Args: as packmule.train.subject.TextSubject.

    Raises:
        ConfigError: his code cannot be used, or gives something else than it did when it was measured.
    """

    def __init__(self, request: Request, folder: RunFolder, plan: Plan) -> None:
        shape = folder.module_shape()
        assert shape is not None
        import_from(request.import_path)
        self._request, self._folder, self._plan = request, folder, plan
        self.shape = self._shape = shape
        self.record = {"model_type": "modules", "factory": shape.factory, "arguments": shape.arguments}
        numerics = plan.numerics
        self._types = DTYPES[numerics.precision]
        dataset = open_dataset(shape.dataset, shape.dataset_arguments, numerics.seed)
        _refuse_length("The data set", dataset, shape.samples)
        train, held_out = split(len(dataset), request.val_size, numerics.seed)
        self._building = Building(shape.factory, shape.arguments, numerics.seed, self._types.compute)
        if len(self._building) != len(shape.parts):
            raise ConfigError(
                f"`{shape.factory}` gives {_blocks(self._building)}, not {_blocks(shape.parts)}.", RESTORE
            )
        targets = self._building.targets
        self._samples = Samples(dataset, train, numerics.seed, targets)
        judged = Samples(dataset, held_out, numerics.seed, targets)
        own = shape.validation
        if own is not None:
            dataset = open_dataset(own.dataset, own.arguments, numerics.seed, VALIDATION)
            _refuse_length("The validation data set", dataset, own.samples)
            judged = Samples(dataset, np.arange(own.samples), numerics.seed, targets, VALIDATION)
        self._buffers: dict[str, Tensor] = {}
        self._bodies: ModuleBodies | None = None

        def batch(first: int, count: int) -> object:
            return judged.micro_batch(judged.numbers(first, count))

        sets = (EvaluationSet(HELD_OUT, batch),) if len(judged) else ()
        self.reading = Reading(sets, None, None)

    @property
    def modules(self) -> ModuleBodies:
        if self._bodies is None:
            for _ in self.parts():
                pass
        assert self._bodies is not None
        return self._bodies

    def parts(self) -> Iterator[Part]:
        """Each block while it has its parameters; then there are `modules`."""
        for index, part in enumerate(self._building):
            changed = difference(part.name, self._shape.parts[index].parameters, tensor_records(part))
            if changed:
                raise ConfigError(f"{changed}.", RESTORE)
            kept = part.module.state_dict(keep_vars=True)
            own = {name: value for name, value in part.module.named_buffers() if name in kept}
            for name, value in own.items():
                self._buffers[f"{part.name}.{name}"] = value.detach().contiguous().clone()
            yield part
        if self._request.work == "train":
            path = self._folder.model / BUFFERS
            if self._buffers:
                path.write_bytes(save(self._buffers))
            else:
                path.unlink(missing_ok=True)
        self._buffers = {}
        self._bodies = ModuleBodies(self._building.model, self._types, self._plan.numerics.seed)
        trim_malloc()

    def step(self, cursor: int, cut: tuple[int, ...]) -> StepRows:
        numbers = self._samples.numbers_at(cursor, sum(cut))
        batches, start = [], 0
        for count in cut:
            place = cursor + start
            batches.append(self._samples.micro_batch(numbers[start : start + count], place))
            start += count
        return StepRows(numbers, batches, sum(batch.targets for batch in batches))

    def source(self, disk: Disk, kernels: Kernels) -> AbstractContextManager[Source]:
        if self._request.weights:
            return RunSource(StateReader.open(disk, Path(self._request.weights), kernels.crc32c))
        return BuiltWeights(self.parts())

    @property
    def export_bytes(self) -> int:
        return export_bytes(self.shape, "float32")

    def export(self, folder: Path, tensors: Tensors) -> None:
        write_modules(folder, self._shape, tensors, "float32", self._folder.model)


def _refuse_length(what: str, dataset: Sized, measured: int) -> None:
    if len(dataset) != measured:
        raise ConfigError(
            f"{what} has {len(dataset):,} samples, and had {measured:,} when it was measured.",
            "run the same command again",
        )


def _blocks(parts: Sized) -> str:
    return f"{len(parts) - 2} blocks"


class BuiltWeights:
    """The parameters that a user's function has made, block after block. A context manager.

    Args:
        parts: of all blocks, each while it has its parameters.
    """

    def __init__(self, parts: Iterator[Part]) -> None:
        self._parts = parts
        self._block = -1
        self._named: dict[str, Tensor] = {}

    def check(self, shape: Shape) -> None:
        """Nothing to find out: blocks are checked as they are made."""

    def chunks(
        self, block: Block, parameter: Parameter, chunk_bytes: int
    ) -> Iterator[tuple[int, np.ndarray]]:
        """As packmule.train.transfer.Source; blocks in their order only."""
        while self._block < block.index:
            self._named = {}
            part = next(self._parts)
            self._block += 1
            self._named = dict(part.module.named_parameters())
        flat = self._named[parameter.name].detach().reshape(-1)
        wide = torch.float64 if flat.dtype == torch.float64 else torch.float32
        step = max(1, chunk_bytes // 8)
        for first in range(0, len(flat), step):
            yield first, flat[first : first + step].to(wide).numpy()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._named = {}
        if error is None:
            for _ in self._parts:  # let go of the last one
                raise RuntimeError("a block was left out")


def tensor_records(part: Part) -> tuple[TensorRecord, ...]:
    """A block's parameters as a ModuleShape has them."""
    return tuple(
        TensorRecord(name=p.name, shape=p.shape, role=p.role, aliases=part.aliases.get(p.name, ()))
        for p in part.parameters
    )
