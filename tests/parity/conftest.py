"""Fixtures of the parity tests."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch

from packmule.kernels import load
from packmule.kernels.contract import Kernels


@pytest.fixture
def rng(seed: int) -> random.Random:
    """Random inputs from this run's seed."""
    return random.Random(seed)


@pytest.fixture(autouse=True)
def no_autograd() -> Iterator[None]:
    """As the engine runs the bodies."""
    with torch.no_grad():
        yield


@pytest.fixture(scope="session")
def kernels() -> Iterator[Kernels]:
    """The twin in torch, so that a fault in native code shows in its own tests, not here."""
    family = load(2, "torch")
    yield family
    family.close()
