"""Steps of a model whose state does not fit in memory, beside what its cores and its disk could do alone.

    python benchmarks/bigger_than_memory.py --shape 374m --ram 1.3GB --clip 0
    python benchmarks/bigger_than_memory.py --shape 1.1b --ram 2.5GB

State (fp32 masters and AdamW moments) is on disk and committed every step. One process executes, with the
real executor and under the plan that was found for the budget:

    step    the step
    C       the same graph with every disk task doing nothing: what the cores need. Checksums of what was
            read are taken all the same, and hold
    D       the same graph with every task of the cores doing nothing: what the disk needs

The three take turns, since a machine's speed drifts. Prints the step against max(C, D) (limit 1.15), D
against the bytes over the disk's rate at the same mix of reads and writes, measured in the same run (limit
1.1), the bytes against the formula for the plan's mode (limit 1.05), and peak memory against the budget.
Exit code 1 when a limit is missed.

A machine's cores may be slower while its disk is busy, whoever drives it (its memory, or its hypervisor, are
busy too): by how much is printed, and so is on which tasks the cores spent more than alone.

While gradients are clipped, updates cannot begin before the last gradient is there, and each block's has
to end before the next forward reaches it: so what forward and backward each need, by their busier
side, is printed too. With a clip that no gradient reaches (`--clip 1000`) the plan speculates.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from fresh_engine import fresh_engine, random_batches, set_up_process

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from packmule.engine.engine import Engine
    from packmule.engine.program import Task
    from packmule.engine.runtime import Runtime, StepState
    from packmule.graph.kinds import TaskKind
    from packmule.graph.step import StepGraph
    from packmule.spec.plan import Plan
    from packmule.spec.timeline import Timeline

SHAPES = {
    "374m": {
        "hidden_size": 1024, "num_hidden_layers": 24, "intermediate_size": 2816, "vocab_size": 32000,
        "num_attention_heads": 16, "num_key_value_heads": 16,
    },
    "1.1b": {
        "hidden_size": 2048, "num_hidden_layers": 22, "intermediate_size": 5632, "vocab_size": 32000,
        "num_attention_heads": 32, "num_key_value_heads": 4,
    },
}  # fmt: skip
LENGTH = 512
RATE = 1e-4
MOST_OVER_BOUND, MOST_OVER_DISK, MOST_OVER_FORMULA = 1.15, 1.1, 1.05


def config_of(shape: str) -> dict[str, Any]:
    """A Hugging Face config.json."""
    more = {"max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "tie_word_embeddings": False}
    return {"model_type": "llama", **more, **SHAPES[shape]}


def formula(parameters: int, streamed: int, plan: Plan) -> tuple[float, float]:
    """(read, written) bytes of a step: 12 a parameter each way for its state; 4 each way for a gradient kept
    on disk; a bf16 weight is written once and read for each pass that no update serves.

    Args:
        parameters: of the model.
        streamed: of the layers, which are used twice a step.
    """
    read = written = 12.0 * parameters
    place, served = plan.placement, plan.update == "on-fetch"
    if place.gradients == "disk":
        read, written = read + 4.0 * parameters, written + 4.0 * parameters
    passes = streamed + (0 if served else parameters)
    if place.weights == "disk":
        read, written = read + 2.0 * passes, written + 2.0 * parameters
    elif place.weights == "state":
        read += 4.0 * passes
    return read, written


def disk_rate(path: Path, share_read: float) -> float:
    """Bytes per second of O_DIRECT reads and writes in that proportion, 4 MiB at a time, of 8 GiB in all:
    along the first half of a large file reads, along the second half writes, as blocks' slots are."""
    import time

    import numpy as np

    from packmule.tiers.disk import PosixDisk, aligned_buffer

    disk, size = PosixDisk(), 4 << 20
    buffer, half = aligned_buffer(size), disk.size(path) // 2 // size
    np.frombuffer(buffer, np.uint8)[:] = np.random.default_rng(0).integers(0, 256, size, np.uint8)
    handle, count = disk.open(path, write=True), min(2048, 2 * half)
    reads = writes = 0
    rates = []
    for _ in range(3):
        owed, began = 0.0, time.perf_counter()
        for _ in range(count):
            owed += share_read
            if owed >= 1:
                owed -= 1
                disk.read_into(handle, buffer, reads % half * size)
                reads += 1
            else:
                disk.write(handle, buffer, (half + writes % half) * size)
                writes += 1
        disk.sync(handle)
        rates.append(size * count / (time.perf_counter() - began))
    disk.close(handle)
    return median(rates)


def beside_disk(path: Path, share_read: float) -> tuple[float, float]:
    """How many times as long a matrix product takes while another thread keeps the disk busy, which takes
    next to none of the cores' time; and the disk's rate then."""
    import time
    from concurrent.futures import ThreadPoolExecutor

    import torch

    a, b = (torch.rand(shape).bfloat16() for shape in ((LENGTH, 2048), (2048, 5632)))

    def products(until: Callable[[], bool]) -> float:
        """Per second."""
        count, began = 0, time.perf_counter()
        while not until():
            torch.mm(a, b)
            count += 1
        return count / (time.perf_counter() - began)

    ratios, rates = [], []
    with ThreadPoolExecutor(1) as other:
        for _ in range(3):
            deadline = time.perf_counter() + 2
            alone = products(lambda end=deadline: time.perf_counter() > end)
            moved = other.submit(disk_rate, path, share_read)
            ratios.append(alone / products(moved.done))
            rates.append(moved.result())
    return median(ratios), median(rates)


def without(bodies: dict[TaskKind, Any], idle: Callable[[TaskKind], bool]) -> dict[TaskKind, Any]:
    """The bodies, those of some kinds doing nothing."""
    return {kind: (lambda runtime, task: None) if idle(kind) else body for kind, body in bodies.items()}


class Anything(int):
    """The checksum of what has not been read."""

    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return False

    __hash__ = int.__hash__


def unread(runtime: Runtime, task: Task) -> None:
    """State from a disk that takes no time: left to verify to the task that takes it, whatever it is."""
    from packmule.checkpoint.reader import Place
    from packmule.engine.stored import moving

    for chunk in moving(runtime, task):
        runtime.state.unverified[chunk.at] = Place(task.block, 0, chunk.number, Anything())


def alone(engine: Engine, graph: StepGraph, bodies: dict[TaskKind, Any], state: StepState) -> Timeline:
    """One execution of a graph of the engine with other bodies."""
    from packmule.engine.program import Program

    engine.runtime.state = state
    return Program(engine.runtime, lambda: graph, bodies).run()


def phases(graph: StepGraph, timeline: Timeline, resource: str) -> tuple[float, float]:
    """Seconds that a resource works before the head's loss and from there on."""
    import numpy as np

    from packmule.graph.kinds import TaskKind

    head = int(np.flatnonzero(graph.kind == TaskKind.HEAD_LOSS)[0])
    mine = graph.resources.index(resource)
    work = np.where([int(graph.uses.row(task)[0]) == mine for task in range(graph.tasks)], 1.0, 0.0)
    work *= timeline.end - timeline.start
    return float(work[:head].sum()), float(work[head:].sum())


def slower(graph: StepGraph, step: Timeline, computed: Timeline) -> str:
    """The kinds of tasks on whose account the cores were busy longer than alone."""
    import numpy as np

    from packmule.graph.kinds import TaskKind

    more = (step.end - step.start) - (computed.end - computed.start)
    cores = graph.resources.index("cores")
    mine = np.array([int(graph.uses.row(task)[0]) == cores for task in range(graph.tasks)])
    found = {kind: float(more[mine & (graph.kind == kind)].sum()) for kind in np.unique(graph.kind[mine])}
    most = sorted(found, key=lambda kind: -found[kind])[:3]
    words = ", ".join(f"{TaskKind(kind).name.lower()} {found[kind]:.2f} s" for kind in most)
    return f"cores busy {sum(found.values()):.2f} s longer than alone: {words}"


def gaps(timeline: Timeline, graph: Any) -> str:
    """Seconds in which each resource had nothing under way, and both at once."""
    import numpy as np

    home = np.array([graph.resources[int(graph.uses.row(task)[0])] for task in range(graph.tasks)])
    edges = np.unique(np.concatenate([timeline.start, timeline.end]))
    busy = {}
    for name in graph.resources:
        mask = home == name
        begun = np.searchsorted(np.sort(timeline.start[mask]), edges[:-1], side="right")
        ended = np.searchsorted(np.sort(timeline.end[mask]), edges[:-1], side="right")
        busy[name] = begun > ended
    length = np.diff(edges)
    idle = {name: float(length[~found].sum()) for name, found in busy.items()}
    neither = float(length[~np.logical_or.reduce(list(busy.values()))].sum())
    words = ", ".join(f"{name} idle {seconds:.2f} s" for name, seconds in idle.items())
    return f"{words}, both at once {neither:.2f} s"


def fill(memory: memoryview, pattern: NDArray[np.uint16]) -> None:
    """Repeat a pattern over some memory, without a copy of it all."""
    import numpy as np

    target = np.frombuffer(memory, np.uint16)
    for start in range(0, len(target), len(pattern)):
        part = target[start : start + len(pattern)]
        part[:] = pattern[: len(part)]


def shown(seconds: list[float]) -> str:
    """The median, and all."""
    return f"{median(seconds):.2f} ({', '.join(f'{s:.2f}' for s in seconds)})"


def main() -> int:
    """Measure, print, compare."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=sorted(SHAPES), default="374m")
    parser.add_argument("--ram", default="1.3GB")
    parser.add_argument("--tokens", type=int, default=2048, help="of a step")
    parser.add_argument("--clip", type=float, default=1.0, help="0: none")
    parser.add_argument("--rounds", type=int, default=3, help="of a step, its cores alone, its disk alone")
    parser.add_argument("--folder", default=".", help="on the disk to use")
    arguments = parser.parse_args()
    set_up_process()
    import time

    import numpy as np

    from packmule.checkpoint.head import STATE_NAME
    from packmule.engine.bodies import BODIES
    from packmule.engine.runtime import Ahead, StepState
    from packmule.graph.kinds import TaskKind
    from packmule.graph.simulate import simulate
    from packmule.graph.traffic import traffic, uses_disk
    from packmule.optim.rule import Update
    from packmule.plan.search import search
    from packmule.probe import load
    from packmule.shapes.model import ModelShape
    from packmule.spec.environment import read_environment
    from packmule.spec.job import load_job
    from packmule.spec.units import format_bytes, parse_bytes
    from packmule.train.memory import process_memory
    from packmule.train.situation import make_numerics, make_situation

    budget, rows = parse_bytes(arguments.ram), arguments.tokens // LENGTH
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        hardware = load(read_environment().cache / "probe.json", name)
        config = config_of(arguments.shape)
        shape = ModelShape.from_config(config, "benchmark")
        job = load_job(
            f"model: {{path: none-needed}}\n"
            f"train: {{output_dir: {name}, max_seq_length: {LENGTH}, global_batch_size: {rows}, "
            f"max_steps: 100, precision: bf16-mixed}}\n"
            f"optim: {{learning_rate: {RATE}, lr_scheduler: constant, max_grad_norm: {arguments.clip}}}\n"
            f"hardware: {{state: disk}}\n",
            "benchmark",
        )
        situation = make_situation(
            job, shape, hardware, budget, None, make_numerics(job, hardware, 100), False, 0
        )
        # Alone in its process: what the parent of a run would take is not there.
        situation = replace(
            situation,
            mean_length=float(LENGTH),
            hardware=hardware.model_copy(update={"parent_baseline_bytes": 0}),
            evaluation_rows=(),
        )
        plan = search(situation).plan
        batches = random_batches(plan, shape.vocab, LENGTH)
        targets = rows * (LENGTH - 1)
        with fresh_engine(Path(name), config, shape, plan, hardware, LENGTH) as (engine, progress):
            micro, number = plan.numerics.micro_tokens, 0

            def state() -> StepState:
                prepared = [engine.runtime.prepare(batch) for batch in batches]
                update = Update(number + 1, RATE)
                ahead = Ahead(update, progress)
                return StepState(prepared, number + 1, micro, 1 / targets, update, progress, ahead)

            # In place of what C does not read: random numbers of about 0.01 in both float types.
            rng = np.random.default_rng(0)
            noise = (0x3C00 | rng.integers(0, 128, 1 << 20) | rng.integers(0, 2, 1 << 20) << 15).astype(
                np.uint16
            )
            steps, cores, disk_alone, by_phase, peak = [], [], [], [], 0
            for _ in range(arguments.rounds):
                engine.load()
                # The first may have no update pending yet; the second one that was not foreseen.
                for _ in range(3 if plan.speculate else 2 if plan.update == "on-fetch" else 1):
                    number += 1
                    began = time.perf_counter()
                    result = engine.step(batches, targets, Update(number, RATE), progress, commit=True)
                    seconds = time.perf_counter() - began
                steps.append(seconds)
                peak = max(peak, process_memory().peak)
                fill(engine.arena.memory, noise)
                graph, norm = result.graph, result.outcome.grad_norm
                null = {**without(BODIES, uses_disk), TaskKind.READ_STATE: unread}
                computed = alone(engine, graph, null, state())
                cores.append(computed.seconds)
                idle = without(BODIES, lambda kind: not uses_disk(kind))
                engine.load()
                moved = alone(engine, graph, idle, state())
                disk_alone.append(moved.seconds)
                pairs = zip(phases(graph, computed, "cores"), phases(graph, moved, "disk"), strict=True)
                by_phase.append(sum(max(pair) for pair in pairs))
            read, written = traffic(graph)
            share = read / (read + written)
            # Of the run's own state, which is not needed any more.
            state_file = engine.runtime.store.folder / STATE_NAME
            rate, (longer, while_busy) = disk_rate(state_file, share), beside_disk(state_file, share)
    bound = [max(pair) for pair in zip(cores, disk_alone, strict=True)]
    ratio = median(step / least for step, least in zip(steps, bound, strict=True))
    stated = sum(formula(shape.numel, sum(b.numel for b in shape.blocks() if b.kind == "layer"), plan))
    place = plan.placement
    print(
        f"{arguments.shape}: {shape.numel / 1e6:.0f}M parameters, {arguments.tokens} tokens a step, "
        f"clip {arguments.clip or 'off'}, {hardware.cpu}, {plan.numerics.threads} threads\n"
        f"plan      {plan.update}{', speculating' * plan.speculate}, weights {place.weights}, "
        f"gradients {place.gradients}, "
        f"inputs {place.inputs}, {sum(plan.recompute)} of {shape.layers} layers recomputed, micro-batches "
        f"{'+'.join(map(str, plan.numerics.micro_rows))}, prefetch {plan.io.prefetch}, chunks "
        f"{format_bytes(plan.io.chunk_bytes)}\n"
        f"peak      {format_bytes(peak)} of {format_bytes(budget)}\n"
        f"step      {shown(steps)} s; C {shown(cores)} s; D {shown(disk_alone)} s; predicted "
        f"{simulate(graph).seconds:.2f} s\n"
        f"          {gaps(result.timeline, graph)}; gradient norm {norm:.3g}\n"
        f"          {slower(graph, result.timeline, computed)}\n"
        f"          {median(by_phase):.2f} s if forward and backward each take what their busier side needs\n"
        f"disk      {format_bytes(read)} read, {format_bytes(written)} written; {format_bytes(rate)}/s "
        "in that proportion\n"
        f"          a matrix product takes {longer:.2f} times as long while the disk moves "
        f"{format_bytes(while_busy)}/s"
    )
    ok = peak <= budget
    for text, value, limit in (
        ("step / max(C, D)", ratio, MOST_OVER_BOUND),
        ("D / (bytes / rate)", median(disk_alone) * rate / (read + written), MOST_OVER_DISK),
        ("bytes / formula", (read + written) / stated, MOST_OVER_FORMULA),
    ):
        print(f"{text:20} {value:.3f} (limit {limit}){'' if value <= limit else '  MISSED'}")
        ok = ok and value <= limit
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
