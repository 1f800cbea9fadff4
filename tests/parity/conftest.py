"""Fixtures of the parity tests."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch
from tests.conftest import SEED
from tests.parity.architectures import Architecture

from packmule.kernels import load, native
from packmule.kernels.contract import Kernels


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without `--long`, each test of the table of architectures runs once per row, with one of its
    precisions, kernel families and ties drawn from this run's seed: all of them take an hour."""
    if config.getoption("--long"):
        return
    groups: dict[tuple[str, str], list[pytest.Item]] = {}
    for item in items:
        row = getattr(item, "callspec", None) and item.callspec.params.get("row")  # type: ignore[attr-defined]
        if isinstance(row, Architecture):
            groups.setdefault((item.nodeid.split("[")[0], row.name), []).append(item)
    rng = random.Random(config.stash[SEED])
    kept = {id(rng.choice(group)) for group in groups.values()}
    dropped = [item for group in groups.values() for item in group if id(item) not in kept]
    config.hook.pytest_deselected(items=dropped)
    gone = set(map(id, dropped))
    items[:] = [item for item in items if id(item) not in gone]


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
