"""One bench and one finished run for all tests of commands: a start costs what importing torch costs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from tests.cli.bench import Bench, Done
from tests.cli.modules import Modules
from tests.conftest import SEED

from packmule.kernels import load
from packmule.kernels.contract import Kernels


@pytest.fixture(scope="session")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    """Shared: a test uses job names of its own."""
    return Bench.make(tmp_path_factory.mktemp("bench"), 20)


@pytest.fixture(scope="session")
def trained(bench: Bench) -> Done:
    """`packmule train run.yaml`: six steps with samples, evaluations and snapshots, in text."""
    path = bench.job(
        "run", train__max_steps=6, train__eval_steps=3, checkpoint__save_steps=2,
        train__sample_prompt="the mule", train__sample_tokens=6,
    )  # fmt: skip
    return bench.run("train", path.name).succeeded()


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """As the runs have: sums of other threads may be rounded otherwise."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def kernels() -> Iterator[Kernels]:
    """What a run with one thread uses."""
    family = load(1)
    yield family
    family.close()


@pytest.fixture(scope="session")
def modules(bench: Bench, request: pytest.FixtureRequest) -> Modules:
    """Shared, as the bench is."""
    return Modules(bench, request.config.stash[SEED])
