"""Runs of tests.exactness.user_modules in a bench's folder, and the same runs as plain loops."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from tests.cli.bench import Bench, Done
from tests.exactness.user_modules import ModuleCase, Points, plain_run

from packmule.checkpoint.reader import StateReader
from packmule.kernels import checksum
from packmule.kernels.contract import Kernels
from packmule.models.modules.samples import Samples, split
from packmule.spec.plan import Plan
from packmule.tiers.disk import PosixDisk, aligned_buffer

ROOT = Path(__file__).parents[2]
STEPS, COUNT, HELD_OUT = 5, 40, 7
MODULE = "tests.exactness.user_modules"


class Modules:
    """Jobs over tests.exactness.user_modules in a bench's folder."""

    def __init__(self, bench: Bench, seed: int) -> None:
        self.bench, self.seed = bench, seed % 2**31

    def job(self, name: str, **changes: Any) -> Path:
        text = json.loads(self.bench.job(name).read_text())
        text["model"] = {"factory": f"{MODULE}:make", "arguments": {"dropout": 0.3, "reports": True}}
        arguments = {"seed": self.seed, "count": COUNT}
        text["data"] = {"factory": f"{MODULE}:Points", "arguments": arguments, "val_size": HELD_OUT}
        text["train"] = {
            "output_dir": name, "global_batch_size": 6, "max_steps": STEPS, "precision": "fp32",
            "eval_steps": 3, "seed": self.seed,
        }  # fmt: skip
        for key, value in changes.items():
            section, field = key.split("__")
            text.setdefault(section, {})[field] = value
        path = self.bench.folder / f"{name}.yaml"
        path.write_text(json.dumps(text))
        return path

    def run(self, *words: str | Path, **variables: str) -> Done:
        return self.bench.run(*words, PYTHONPATH=self.path, **variables)

    @property
    def path(self) -> str:
        """Where the run's processes find this module's neighbours."""
        return os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])

    def case(self, plan: Plan, dropout: float = 0.3, held_out: int = HELD_OUT) -> ModuleCase:
        """What a run of `job` starts from."""
        train, _ = split(COUNT, held_out, self.seed)
        return ModuleCase.of(
            plan, self.seed, dropout, samples=Samples(Points(self.seed, COUNT), train, self.seed)
        )

    def plain(
        self, plan: Plan, kernels: Kernels
    ) -> tuple[ModuleCase, list[tuple[float, float]], list[bytes]]:
        """The same run as a plain loop: its case, losses and norms, and the state it ends in."""
        case = self.case(plan)
        trace, images = plain_run(case, STEPS, kernels)
        return case, trace, images[-1]


def entries(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]


def trained(run: Path) -> list[tuple[float, float]]:
    return [(e["train/loss"], e["train/grad_norm"]) for e in entries(run) if "train/loss" in e]


def state(run: Path) -> list[bytes]:
    """Every plane of every block of the last commit."""
    found = []
    with StateReader.open(PosixDisk(), run, checksum()) as reader:
        for block, record in enumerate(reader.layout.blocks):
            buffer = aligned_buffer(record.plane_bytes)
            image = b""
            for plane in reader.layout.planes:
                reader.read_plane(block, plane, buffer)
                image += bytes(buffer)
            found.append(image)
    return found


def plan_of(run: Path) -> Plan:
    """The plan of a run's last start."""
    return Plan.parse_json((run / "plan.json").read_text(), "plan.json")
