"""Micro-batches from a user's data set: a function named `module:function` gives an object with
`__len__` and `__getitem__`. The order is a seeded permutation that is entered anywhere.
"""

from __future__ import annotations

import hashlib
import random
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from packmule.data.order import ordered
from packmule.data.rows import validation_documents
from packmule.errors import ConfigError
from packmule.models.modules.build import call, load


class SampleBatch(NamedTuple):
    """One micro-batch.

    Attributes:
        data: the samples joined: tensors [B, ...], or what the data set's `collate` makes of them.
        rows: B.
        targets: losses that the head is to give.
    """

    data: Any
    rows: int
    targets: int

    @property
    def tokens(self) -> int:
        """What progress counts: samples."""
        return self.rows


class Draw(NamedTuple):
    """Which random numbers a task draws: those of a step, counted from 1, and a micro-batch."""

    step: int
    micro: int


class Samples:
    """Some samples of a data set, in the order of a seed.

    Before a sample is asked for, the generators of torch, numpy and random are seeded by its place in the
    run, so that a data set may augment at random: another way each time, and the same way after a resume.

    Args:
        dataset: `__len__`, `__getitem__` and optionally `collate(list of samples)`.
        chosen: int64, their numbers.
        seed: of the order.
        targets: losses of one sample; one each by default.
        name: of the data set, for messages.
    """

    def __init__(
        self,
        dataset: Any,
        chosen: np.ndarray,
        seed: int,
        targets: Callable[[Any], int] | None = None,
        name: str = "the data set",
    ) -> None:
        self._dataset, self._chosen, self._seed, self._targets = dataset, chosen, seed, targets
        self._name = name

    def __len__(self) -> int:
        return len(self._chosen)

    def numbers_at(self, cursor: int, count: int) -> tuple[int, ...]:
        """Numbers of the `count` samples from global position `cursor` on; each comes once per epoch."""
        return tuple(self._chosen[list(ordered(len(self), self._seed, cursor, count))].tolist())

    def numbers(self, first: int, count: int) -> tuple[int, ...]:
        """Numbers of some samples in the data set's own order."""
        return tuple(self._chosen[first : first + count].tolist())

    def micro_batch(self, numbers: Sequence[int], place: int | None = None) -> SampleBatch:
        """Some samples joined.

        Args:
            place: of the first in the run; None where the model is evaluated.
        """
        from torch.utils.data import default_collate

        places = [-1 - number for number in numbers] if place is None else range(place, place + len(numbers))
        found = [self._sample(number, at) for number, at in zip(numbers, places, strict=True)]
        collate = getattr(self._dataset, "collate", default_collate)
        data = call("joining samples (`collate`)", collate, found)
        return SampleBatch(data, len(found), sum(self._count(sample) for sample in found))

    def _sample(self, number: int, place: int) -> Any:
        seed_all(self._seed, place)
        return call(f"sample {number} of {self._name}", self._dataset.__getitem__, number)

    def _count(self, sample: Any) -> int:
        return 1 if self._targets is None else int(call("`targets`", self._targets, sample))


def seed_all(*words: int) -> None:
    """Seed every generator that a user's code may draw from."""
    digest = hashlib.blake2b(struct.pack(f"<{len(words)}q", *words), digest_size=8).digest()
    seed = int.from_bytes(digest, "little")
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


VALIDATION = "the validation data set"
"""What a data set to evaluate on is called in messages."""


def open_dataset(factory: str, arguments: Mapping[str, Any], seed: int, name: str = "the data set") -> Any:
    """Call the user's function, with every generator seeded.

    Args:
        name: of the data set, for messages.

    Raises:
        ConfigError: it cannot be used, or has no samples.
    """
    seed_all(seed)
    dataset = call(f"`{factory}`", load(factory, name), **arguments)
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise ConfigError(
            f"`{factory}` gave a {type(dataset).__name__}, which has no length or no samples by number.",
            "give an object with `__len__` and `__getitem__`: a position in it can be resumed",
        )
    if call(f"the length of `{factory}`", len, dataset) == 0:
        raise ConfigError(f"`{factory}` gave an empty data set.", "give some samples")
    return dataset


def split(count: int, val_size: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Numbers of the samples that are trained on, and of those held out."""
    held_out = validation_documents(count, val_size, seed)
    return np.flatnonzero(~held_out), np.flatnonzero(held_out)
