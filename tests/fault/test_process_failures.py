"""What a run cannot help: numbers that are not finite, memory that is not there."""

from __future__ import annotations

import io
import json
import random
from pathlib import Path

import numpy as np
import pytest
from jobs import PLANS, Base, head_step, some, state_of

from packmule.errors import OutOfMemory
from packmule.train import child
from packmule.train.messages import Request
from packmule.train.watch import explain_death


@pytest.fixture
def base(tmp_path_factory: pytest.TempPathFactory) -> Base:
    return Base.of(tmp_path_factory.getbasetemp())


def test_a_loss_that_is_not_finite_is_never_committed(
    base: Base, tmp_path: Path, seed: int, long: bool
) -> None:
    for plan in some(PLANS, random.Random(seed), long):
        job = base.job(tmp_path / plan, plan, learning_rate="1e30", warmup_steps="0")
        job.run().refused(5, "not finite", "--max-grad-norm", "learning rate")
        assert head_step(job.out) <= 1  # the first update was made of finite numbers
        state_of(job.out)
        job.run().refused(5, "not finite")


def test_weights_that_are_not_finite_are_told_at_the_first_step(base: Base, tmp_path: Path) -> None:
    folder = base.copy(tmp_path / "copy", "on-backward").out / "final"
    poison(folder / "model.safetensors", "model.layers.1.mlp.up_proj.weight")
    flags = {"model": str(folder), "model.init": "pretrained"}
    job = base.job(tmp_path / "run", "on-backward", **flags)
    result = job.run()
    result.refused(5, "not finite")
    assert head_step(job.out) == 0


def poison(path: Path, tensor: str) -> None:
    """Put a NaN in one tensor of a safetensors file."""
    data = bytearray(path.read_bytes())
    length = int.from_bytes(data[:8], "little")
    entry = json.loads(data[8 : 8 + length])[tensor]
    assert entry["dtype"] == "F32"
    at = 8 + length + entry["data_offsets"][0] + 4 * 5
    data[at : at + 4] = np.float32("nan").tobytes()
    path.write_bytes(data)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError(
            "[enforce fail at alloc_cpu.cpp:119] err == 0. DefaultCPUAllocator: can't allocate memory"
        ),
        MemoryError(),
    ],
)
def test_an_allocation_beyond_the_budget_fails_in_words(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What RLIMIT_DATA makes of an overrun (tests/memory holds that it does) ends as exit code 5."""

    def serve(*_: object) -> None:
        raise error

    request = Request(work="train", folder="x", state="x", data="x", ram_bytes=1)
    monkeypatch.setattr(child, "_serve", serve)
    monkeypatch.setattr(child, "Signals", lambda: None)
    monkeypatch.setattr(child, "tune_malloc", lambda: None)
    monkeypatch.setattr(child, "tune_caches", lambda primitives: None)
    monkeypatch.setattr("sys.stdin", io.StringIO(request.model_dump_json() + "\n"))
    assert child.main() == 0
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [event["event"] for event in events] == ["error", "end"]
    assert events[0]["exit_code"] == 5 and events[0]["kind"] == "OutOfMemory"
    assert events[0]["cause"].startswith("An allocation failed at the budget: ")
    assert "--ram" in events[0]["hint"]


def test_sigkill_is_called_out_of_memory_only_where_the_kernel_counted_it() -> None:
    assert "kill -9" in explain_death(-9, "", 0).cause
    assert "out-of-memory killer" in explain_death(-9, "", 1).cause
    assert explain_death(-9, "", 1).exit_code == 5
    assert explain_death(-15, "").exit_code == 143
    aborted = explain_death(-6, "terminate called after throwing std::bad_alloc\n")
    assert aborted.exit_code == 5 and "SIGABRT" in aborted.cause and "bad_alloc" in aborted.cause
    assert isinstance(aborted, OutOfMemory)
    assert not isinstance(explain_death(-11, "Segmentation fault\n"), OutOfMemory)
