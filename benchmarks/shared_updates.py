"""A step whose updates cores and device share, for several shares: measured, and simulated.

    python benchmarks/shared_updates.py [--link 1e9] [--steps 3] [--shares 0,20,40,60,80,100]

Two executors of stated rates joined by a link of a stated rate: updates by the cores move a gigabyte a
second through memory, those of the (fake) device ten; each waits when it is faster, so that what is
measured is how well the three overlap, and not this machine. A small model takes few tokens a step, so that
updates are most of it; all its weights stay on the device. The simulation has the same rates, and this
machine's times of what is no update and no transfer, as they were without a share.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fresh_engine import fresh_engine, random_batches, set_up_process

if TYPE_CHECKING:
    from packmule.graph.step import StepGraph
    from packmule.shapes.model import ModelShape
    from packmule.spec.plan import Plan
    from packmule.spec.timeline import Timeline

LENGTH = 16
WARM_UP = 1
CORES, DEVICE = 1e9, 1e10
"""Bytes per second that an update moves through memory."""
MOVED = 7.5 * 4
"""Bytes per parameter that AdamW moves: gradient and three planes read, these and the weight written."""
CONFIG: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 4000, "hidden_size": 320, "num_hidden_layers": 6,
    "num_attention_heads": 5, "num_key_value_heads": 5, "intermediate_size": 864,
    "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
}  # fmt: skip


def plan_of(update: str, share: int) -> Plan:
    """State in RAM, fp32, one thread."""
    from importlib.metadata import version

    from packmule.spec import plan as spec

    return spec.Plan(
        budget_bytes=4 << 30,
        numerics=spec.Numerics(
            precision="fp32", micro_rows=(1,), max_seq_length=LENGTH, loss_chunk=LENGTH, clip=None,
            optimizer=spec.OptimizerNumerics(), seed=0, threads=1, kernels="native", torch=version("torch"),
            schedule=spec.ScheduleNumerics(learning_rate=1e-4, total_steps=100), cpu_features=(),
        ),
        placement=spec.Placement(state="ram", weights="state", inputs="device", device_weights=99),
        device=spec.DevicePlan(name="fake", memory_bytes=2 << 30), device_updates=share, order="breadth",
        recompute=(True,) * int(CONFIG["num_hidden_layers"]), update=update, io=spec.Io(chunk_bytes=1 << 18),
        checkpoint=spec.CheckpointPlan(commit_steps=1000, snapshot_steps=None),
    )  # fmt: skip


class Paced:
    """Kernels whose AdamW takes at least as long as a rate says."""

    def __init__(self, kernels: Any, rate: float) -> None:
        self._kernels, self._rate = kernels, rate

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernels, name)

    def adamw(self, master: Any, *rest: Any, **numbers: Any) -> None:
        """As the kernels', and then a pause."""
        until = time.perf_counter() + master.numel() * MOVED / self._rate
        self._kernels.adamw(master, *rest, **numbers)
        time.sleep(max(0.0, until - time.perf_counter()))


def run(shape: ModelShape, plan: Plan, link: float, steps: int) -> tuple[StepGraph, list[Timeline]]:
    """The graph of a step, and its executions."""
    import torch

    from packmule.optim.rule import Update
    from packmule.probe import load
    from packmule.spec.environment import read_environment
    from packmule.tiers.device import FakeDevice

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as name:
        hardware = load(read_environment().cache / "probe.json", name)
        batches = random_batches(plan, shape.vocab, LENGTH)
        device, found = FakeDevice(link, link), []
        with fresh_engine(Path(name), CONFIG, shape, plan, hardware, LENGTH, device) as (engine, progress):
            kernels = engine.runtime.kernels
            engine.runtime.kernels = Paced(kernels, CORES)  # type: ignore[assignment]
            engine.runtime.near_kernels = Paced(kernels, DEVICE)  # type: ignore[assignment]
            for step in range(steps + WARM_UP):
                update = Update(step + 1, 1e-4)
                result = engine.step(batches, LENGTH - 1, update, progress, commit=False)
                found.append(result.timeline)
        return result.graph, found[WARM_UP:]


def durations(shape: ModelShape, plan: Plan, graph: StepGraph, link: float, others: dict[int, float]) -> Any:
    """Seconds of each task by the rates; of what is no update and no transfer, by kind, in `others`."""
    import numpy as np

    from packmule.graph.kinds import UPDATES
    from packmule.graph.model import PlannedModel

    model = PlannedModel(shape, plan)

    def of(task: int) -> float:
        kind, block, part = (int(column[task]) for column in (graph.kind, graph.block, graph.part))
        if graph.moved[task]:
            return float(graph.moved[task]) / link
        if kind not in UPDATES:
            return others[kind]
        size = model.plane_bytes[block] if part < 0 else model.chunks(block)[part][1]
        there = graph.resources[int(graph.uses.row(task)[0])] == "device"
        return size / 4 * MOVED / (DEVICE if there else CORES)

    return np.array([of(task) for task in range(graph.tasks)])


def timed(graph: StepGraph, lines: list[Timeline]) -> dict[int, float]:
    """Seconds of a task by kind."""
    import numpy as np

    spent = np.median([line.end - line.start for line in lines], axis=0)
    return {int(kind): float(spent[graph.kind == kind].mean()) for kind in np.unique(graph.kind)}


def main() -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--link", type=float, default=1e9)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--shares", default="0,20,40,60,80,100")
    options = parser.parse_args()
    set_up_process()

    from packmule.graph.simulate import simulate
    from packmule.shapes.model import ModelShape

    shape = ModelShape.from_config(CONFIG, "benchmark")
    for update in ("after-backward", "on-backward"):
        print(f"{update}, a link of {options.link / 1e9:g} GB/s each way")
        others: dict[int, float] = {}
        first = predicted_first = 0.0
        for share in map(int, options.shares.split(",")):
            plan = plan_of(update, share)
            graph, lines = run(shape, plan, options.link, options.steps)
            others = others or timed(graph, lines)
            measured = statistics.median(line.seconds for line in lines)
            predicted = simulate(graph, durations(shape, plan, graph, options.link, others)).seconds
            first, predicted_first = first or measured, predicted_first or predicted
            low, high = (function(line.seconds for line in lines) for function in (min, max))
            print(
                f"  {share:3} % on the device   {measured:.3f} s ({low:.3f} to {high:.3f})   "
                f"{measured / first:.2f} of the cores'   simulated {predicted:.3f} s, "
                f"{predicted / predicted_first:.2f}",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
