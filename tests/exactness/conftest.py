"""Fixtures of the exactness tests."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch

from packmule.kernels import load
from packmule.kernels.contract import Kernels


@pytest.fixture(scope="session")
def kernels() -> Iterator[Kernels]:
    """What a run on this machine uses."""
    family = load(1)
    yield family
    family.close()


@pytest.fixture
def rng(seed: int) -> random.Random:
    """Random inputs from this run's seed."""
    return random.Random(seed)


@pytest.fixture(autouse=True)
def as_in_training() -> Iterator[None]:
    """No autograd, as in the training child; one thread, since at these sizes more only wait."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.no_grad():
        yield
    torch.set_num_threads(threads)
