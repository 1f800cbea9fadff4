"""What task bodies work on: one micro-batch as tensors, and what every body of a run shares."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from packmule.models.attention import Run, runs
from packmule.models.rope import Tables, Turn, rope_tables
from packmule.models.views import TORCH_DTYPES
from packmule.shapes.rope import LongRope, Rope
from packmule.spec.batch import IGNORED

if TYPE_CHECKING:
    from packmule.kernels.contract import Kernels
    from packmule.shapes.bodies import Dtypes
    from packmule.shapes.layer import LayerShape
    from packmule.shapes.model import ModelShape
    from packmule.spec.batch import Batch

Tensors = Mapping[str, Tensor]


@dataclass(frozen=True)
class TokenBatch:
    """One micro-batch on the torch side.

    Attributes:
        ids, targets: int64 [N]; positions: int32 [N]; lengths: as in spec.batch.Batch.
        groups: neighboring documents of equal length.
        targets_count: targets that carry loss.
    """

    ids: Tensor
    targets: Tensor
    positions: Tensor
    lengths: tuple[int, ...]
    groups: tuple[Run, ...]
    targets_count: int

    @classmethod
    def from_batch(cls, batch: Batch, place: str = "cpu") -> TokenBatch:
        """Share the arrays' memory; elsewhere than on the CPU, a copy of them."""
        return cls(
            torch.from_numpy(batch.ids).to(place),
            torch.from_numpy(batch.targets).to(place),
            torch.from_numpy(batch.positions).to(place),
            batch.lengths,
            runs(batch.lengths),
            int((batch.targets != IGNORED).sum()),
        )

    @property
    def tokens(self) -> int:
        """N."""
        return len(self.ids)


@dataclass(frozen=True)
class Decoder:
    """What every body of a run shares, and nothing that changes.

    Attributes:
        tables: of each rotary embedding in the model.
    """

    kernels: Kernels
    shape: ModelShape
    types: Dtypes
    tables: Mapping[Rope, Tables]

    @classmethod
    def create(
        cls, kernels: Kernels, shape: ModelShape, types: Dtypes, positions: int, place: str = "cpu"
    ) -> Decoder:
        """Make the tables for positions 0..positions-1, where the model is computed."""
        ropes = dict.fromkeys(layer.rope for layer in shape.layer_shapes)
        tables = {}
        for rope in filter(None, ropes):
            cos, sin, long = rope_tables(rope, positions, types.statistic)
            tables[rope] = Tables(cos.to(place), sin.to(place), long)
        return cls(kernels, shape, types, tables)

    @cached_property
    def embedding_scale(self) -> float:
        """What multiplies the embedding, rounded to the compute dtype as transformers does."""
        scale = torch.tensor(self.shape.variant.embedding_scale, dtype=torch.float64)
        return float(scale.to(TORCH_DTYPES[self.types.compute]))

    def turn(self, layer: LayerShape, positions: Tensor, lengths: Sequence[int]) -> Turn | None:
        """How queries and keys turn in a layer, or None where they do not.

        Args:
            positions: int32 [N], within documents.
            lengths: of the documents, or of the one text that all tokens belong to: LongRope has
                other frequencies for long ones.
        """
        if layer.rope is None:
            return None
        cos, sin, split = self.tables[layer.rope]
        scaling = layer.rope.scaling
        if not split or not isinstance(scaling, LongRope):
            return Turn(cos, sin, positions)
        shifts = [split * (n > scaling.original) for n in lengths]
        if len(set(shifts)) == 1:
            return Turn(cos, sin, positions + shifts[0])
        shift = torch.tensor(shifts, dtype=torch.int32).repeat_interleave(torch.tensor(lengths))
        return Turn(cos, sin, positions + shift.to(positions.device))
