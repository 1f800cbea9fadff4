"""Random shapes, documents and batches for parity tests."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from packmule.models.context import TokenBatch
from packmule.shapes.model import ModelShape
from packmule.spec.batch import IGNORED, Batch


def random_shape(rng: random.Random, tied: bool, grouped: bool) -> ModelShape:
    """A tiny decoder; head_dim * heads differs from hidden, ffn is odd."""
    kv_heads = rng.choice((1, 2, 3))
    head_dim = rng.choice((6, 8, 10, 16))
    heads = kv_heads * (rng.choice((2, 3)) if grouped else 1)
    return ModelShape(
        vocab=rng.randint(50, 130),
        hidden=heads * (head_dim + rng.choice((-1, 1, 3))),
        layers=rng.choice((2, 3)),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        ffn=2 * rng.randint(10, 40) + 1,
        norm_eps=rng.choice((1e-5, 1e-6)),
        rope_theta=rng.choice((1e4, 5e5)),
        tied=tied,
        max_positions=512,
    )


def random_documents(rng: random.Random, shape: ModelShape, lengths: Sequence[int]) -> list[Tensor]:
    """Token ids of documents."""
    return [torch.tensor([rng.randrange(shape.vocab) for _ in range(n)]) for n in lengths]


def pack(documents: Sequence[Tensor]) -> TokenBatch:
    """One micro-batch; each document's last token has no target."""
    ids = np.concatenate([d.numpy() for d in documents])
    targets = np.concatenate([np.append(d.numpy()[1:], IGNORED) for d in documents])
    positions = np.concatenate([np.arange(len(d), dtype=np.int32) for d in documents])
    return TokenBatch.from_batch(Batch(ids, targets, positions, tuple(len(d) for d in documents)))


def relative(ours: Tensor, theirs: Tensor) -> float:
    """Norm-wise relative error in float64."""
    ours, theirs = ours.double(), theirs.double()
    return float((ours - theirs).norm() / theirs.norm().clamp_min(1e-300))
