"""A user's own model as numbers: its blocks' parameters, and what their tasks were measured to take.

Nothing here is derived from an architecture: `packmule.train.gauge` builds the modules in a process of
its own, runs each kind of block at the micro-batches that a plan may choose, and writes this record.
A row is one sample of the user's data set.
"""

from __future__ import annotations

import math
from typing import Any

from pydantic import Field, model_validator

from packmule.shapes.blocks import Block, Parameter, Role
from packmule.shapes.bodies import Dtypes
from packmule.shapes.layout import ITEMSIZE
from packmule.shapes.model import ModelShape
from packmule.spec.records import Record


class TensorRecord(Record):
    """One parameter; `name` is local to its block, as are `aliases`, under which the block has it too."""

    name: str
    shape: tuple[int, ...]
    role: Role
    aliases: tuple[str, ...] = ()


class Cost(Record):
    """One kind of block at one size of micro-batch.

    Bytes are the most that torch holds at once, outputs included, but neither inputs, weights nor
    gradients of weights. Backward includes running forward again; a head's includes all it does in
    training, and its forward is an evaluation.
    """

    rows: int = Field(ge=1)
    forward_bytes: int = Field(ge=0)
    backward_bytes: int = Field(ge=0)
    forward_seconds: float = Field(ge=0)
    backward_seconds: float = Field(ge=0)


class ModulePart(Record):
    """One block: embed, blocks.0, blocks.1, ..., head."""

    name: str
    kind: int = Field(ge=0, description="number of its costs; blocks that are alike share them")
    row_shape: tuple[int, ...] = Field(description="of its output, per row; the head's: nothing")
    parameters: tuple[TensorRecord, ...] = Field(min_length=1)


class ValidationSamples(Record):
    """A user's samples to evaluate on that are not held out of those he trains on."""

    dataset: str = Field(description="`module:function` that makes them")
    arguments: dict[str, Any] = Field(default_factory=dict)
    samples: int = Field(ge=1)


class ModuleShape(Record):
    """A user's model (OUT/model/module.json).

    Raises:
        ValueError: parts without costs.
    """

    format: int = 1
    factory: str = Field(description="`module:function` that makes it")
    arguments: dict[str, Any] = Field(default_factory=dict)
    dataset: str = Field(description="`module:function` that makes its data set")
    dataset_arguments: dict[str, Any] = Field(default_factory=dict)
    precision: str = Field(description="that the costs were measured in")
    samples: int = Field(ge=1, description="length of the data set")
    validation: ValidationSamples | None = Field(default=None, description="where he has some of their own")
    mean_targets: float = Field(gt=0, description="losses of a sample, on average of those looked at")
    parts: tuple[ModulePart, ...] = Field(min_length=3)
    costs: tuple[tuple[Cost, ...], ...] = Field(description="by kind, smallest rows first")
    build_bytes: int = Field(ge=0, description="most that building the modules took at once")
    resident_bytes: int = Field(ge=0, description="of a process that has built them and holds the data set")
    metrics: tuple[str, ...] = Field(default=("loss",), description="what an evaluation reports")
    sample_bytes: int = Field(default=0, ge=0, description="most of a sample of those looked at, joined")

    @model_validator(mode="after")
    def _agree(self) -> ModuleShape:
        if any(part.kind >= len(self.costs) for part in self.parts) or not all(self.costs):
            raise ValueError("a part has no costs")
        return self

    def __hash__(self) -> int:
        return hash((self.factory, self.precision, self.parts, self.costs))

    def blocks(self) -> tuple[Block, ...]:
        """Embed, layers, head, in forward order."""
        last = len(self.parts) - 1
        return tuple(
            Block(
                index,
                part.name,
                "embed" if index == 0 else "head" if index == last else "layer",
                tuple(Parameter(t.name, t.shape, t.role) for t in part.parameters),
                layer=index - 1 if 0 < index < last else -1,
            )
            for index, part in enumerate(self.parts)
        )

    @property
    def layers(self) -> int:
        """Blocks between embed and head."""
        return len(self.parts) - 2

    @property
    def numel(self) -> int:
        """Trainable parameters."""
        return sum(block.numel for block in self.blocks())

    @property
    def tied(self) -> bool:
        """Never: a parameter belongs to one block."""
        return False

    def cut(self, parts: int) -> ModuleShape:
        """Itself: modules have no vocabulary."""
        return self

    @property
    def most_rows(self) -> int:
        """The largest micro-batch that was measured."""
        return min(costs[-1].rows for costs in self.costs)

    def cost(self, block: int, rows: int) -> Cost:
        """A block at a size of micro-batch: as measured, or as the next larger one that was.

        Raises:
            ValueError: more rows than any measured.
        """
        costs = self.costs[self.parts[block].kind]
        found = next((cost for cost in costs if cost.rows >= rows), None)
        if found is None:
            raise ValueError(f"{rows} rows of {self.parts[block].name} were not measured")
        return found

    @property
    def layer_groups(self) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """Each kind of layer with the positions (from 0) of those that are of it."""
        found: dict[int, list[int]] = {}
        for index, part in enumerate(self.parts[1:-1]):
            found.setdefault(part.kind, []).append(index)
        return tuple((kind, tuple(indices)) for kind, indices in found.items())

    def stream_bytes(self, tokens: int, types: Dtypes) -> int:
        """Of a block's input for so many samples; the largest block's counts."""
        most = max(math.prod(part.row_shape) for part in self.parts[:-1])
        return tokens * most * ITEMSIZE[types.compute]


Shape = ModelShape | ModuleShape
"""What a run may train."""
