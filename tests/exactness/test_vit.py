"""examples/vit.py, measured in a process of its own and trained from disk under what was measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.exactness.runs import make_plan
from tests.exactness.user_modules import ModuleCase

from packmule.errors import ConfigError
from packmule.kernels.contract import Kernels
from packmule.models.modules.bodies import ModuleBodies
from packmule.models.modules.build import Part, build
from packmule.models.modules.samples import Samples, open_dataset
from packmule.shapes.bodies import DTYPES
from packmule.shapes.module import ModuleShape
from packmule.spec.environment import read_environment
from packmule.spec.plan import Placement
from packmule.train.messages import GaugeRequest
from packmule.train.watch import run_child

ROOT = Path(__file__).parents[2]
STEPS, ROWS, IMAGES = 60, (16, 16), 32


def gauged(folder: Path, **changes: Any) -> ModuleShape:
    """What packmule.train.gauge finds of the example, or of what `changes` name."""
    request = GaugeRequest(
        model="examples.vit:model", arguments={"width": 32, "depth": 3, "dropout": 0.0},
        dataset="examples.vit:digits", dataset_arguments={"shift": 0}, precision="fp32", rows=(4, 16),
        seed=1, threads=1, ram_bytes=900_000_000, import_path=(str(ROOT), str(folder)),
    ).model_copy(update=changes)  # fmt: skip
    found: dict[str, Any] = {}

    def note(event: dict[str, Any]) -> None:
        found.update(event.get("report", {}))

    run_child(
        "packmule.train.gauge",
        request.model_dump_json(),
        note,
        read_environment().of_child(OMP_NUM_THREADS="1"),
    )
    return ModuleShape.parse(found, "the gauge")


def test_the_example_learns_from_disk_as_it_was_measured(tmp_path: Path, kernels: Kernels, seed: int) -> None:
    shape = gauged(tmp_path)
    assert [part.name for part in shape.parts] == ["embed", "blocks.0", "blocks.1", "blocks.2", "head"]
    assert [part.kind for part in shape.parts] == [0, 1, 1, 1, 2]
    assert {part.row_shape for part in shape.parts[:-1]} == {(17, 32)}
    few, many = shape.costs[1]
    # At least the activations that autograd keeps: the feed-forward half alone holds two of four widths.
    assert many.backward_bytes > 16 * 17 * 32 * 4 * 8 > few.backward_bytes - (4 << 20)
    plan = make_plan(
        "fp32", micro_rows=ROWS, recompute=(True,) * 3, length=1, steps=STEPS, update="on-fetch",
        placement=Placement(state="disk", weights="state", gradients="disk", inputs="disk"),
    )  # fmt: skip
    types, masters = DTYPES["fp32"], []

    def visit(index: int, part: Part) -> None:
        masters.append({name: p.detach().clone() for name, p in part.module.named_parameters()})

    model = build(shape.factory, shape.arguments, seed, types.compute, visit)
    dataset = open_dataset(shape.dataset, shape.dataset_arguments, seed)
    samples = Samples(dataset, np.arange(IMAGES), seed, model.targets)
    case = ModuleCase(shape, plan, ModuleBodies(model, types, seed), masters, samples)
    case.start(tmp_path, kernels)
    engine, _ = case.open(tmp_path, kernels)
    losses = [loss for loss, _ in case.run(engine, 0, STEPS)]
    engine.close()
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5]), losses


def test_what_a_users_code_says_reaches_the_caller(tmp_path: Path) -> None:
    (tmp_path / "loud_user_code.py").write_text(
        "from torch import nn\n"
        "from examples import vit\n"
        "print('printed while imported', end='')\n"
        "class Loud(nn.Linear):\n"
        "    def forward(self, x):\n"
        "        raise ValueError('no such thing')\n"
        "def model():\n"
        "    made = vit.model(width=32, depth=1)\n"
        "    made.blocks.append(Loud(32, 32))\n"
        "    return made\n"
    )
    with pytest.raises(ConfigError, match=r"`blocks.1` failed with ValueError: no such thing .*line 6\)"):
        gauged(tmp_path, model="loud_user_code:model", arguments={})
