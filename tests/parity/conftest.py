"""Fixtures of the parity tests."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch

from packmule.kernels import load, native
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


FAMILIES = ("torch", None) if native.library_path() is not None else ("torch",)
"""The twin in torch, and the native kernels where they are built."""


@pytest.fixture(scope="session", params=FAMILIES, ids=lambda isa: isa or "native")
def kernels(request: pytest.FixtureRequest) -> Iterator[Kernels]:
    """Each family in turn."""
    family = load(2, request.param)
    yield family
    family.close()
