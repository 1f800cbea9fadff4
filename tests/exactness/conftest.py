"""Fixtures of the exactness tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from packmule.kernels import load
from packmule.kernels.contract import Kernels


@pytest.fixture(scope="session")
def kernels() -> Iterator[Kernels]:
    """What a run on this machine uses."""
    family = load(2)
    yield family
    family.close()


@pytest.fixture(autouse=True)
def no_autograd() -> Iterator[None]:
    """As the training child runs."""
    with torch.no_grad():
        yield
