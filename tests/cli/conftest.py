"""One bench and one finished run for all tests of commands: a start costs what importing torch costs."""

from __future__ import annotations

import pytest
from tests.cli.bench import Bench, Done


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
