"""examples/llama-1b-2.5gb.yaml: planned in its own size, trained in a small one."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest
from safetensors import safe_open
from tests.cli.bench import Bench
from tests.cli.test_run_plan import plan_of
from tests.cli.tiny import texts

EXAMPLES = Path(__file__).parents[2] / "examples"
JOB = EXAMPLES / "llama-1b-2.5gb.yaml"
SMALL = {
    "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 176, "vocab_size": 400,
}  # fmt: skip


@pytest.fixture
def place(tmp_path: Path, seed: int) -> Bench:
    """A folder with what the example's header says to make, from other text."""
    bench = Bench.make(tmp_path, seed)
    (tmp_path / "data").mkdir()
    bench.write_texts("data/pydocs.jsonl", texts(seed, 400))
    made = tmp_path / "models" / "llama-1b"
    main = runpy.run_path(str(EXAMPLES / "make_llama_1b.py"))["main"]
    assert main([str(made), str(tmp_path / "data" / "pydocs.jsonl")]) == 0
    return bench


def test_the_example_of_1_1_billion_parameters_fits_its_budget(place: Bench) -> None:
    plan = plan_of(place.run("plan", JOB, "--json").succeeded())
    assert plan.predicted is not None
    assert plan.predicted.peak_ram_bytes <= plan.budget_bytes == 2_500_000_000
    layer = 2 * 2048 * 2048 + 2 * 2048 * 256 + 3 * 2048 * 5632 + 2 * 2048
    parameters = 22 * layer + 2 * 32000 * 2048 + 2048
    assert (plan.placement.state, plan.numerics.precision) == ("disk", "bf16-mixed")
    # fp32 master weights and two moments, twice; chunks are filled up.
    assert max(phase.disk_bytes for phase in plan.predicted.phases) > 2 * 12 * parameters
    assert plan.predicted.disk_bytes_written_per_step >= 12 * parameters


def test_the_same_example_trains_a_small_model_from_disk(place: Bench) -> None:
    config = place.folder / "models" / "llama-1b" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), **SMALL}))
    done = place.run("train", JOB, "--max-steps", "2", "--state", "disk", "--json").succeeded()
    assert [event["step"] for event in done.named("step")] == [1, 2]
    [file] = (place.folder / "runs" / "llama-1b" / "final").glob("*.safetensors")
    with safe_open(file, "np") as tensors:
        assert tensors.get_slice("model.layers.2.mlp.down_proj.weight").get_shape() == [64, 176]
