"""Durable commits and restores beside what the disk could do alone, and beside what people use.

    python benchmarks/checkpoint_speed.py speed --gb 2
    python benchmarks/checkpoint_speed.py cost --state ram
    python benchmarks/checkpoint_speed.py cost --state disk

`speed`: an AdamW state in RAM is made durable by the graph with which a run commits, and read back and
verified by the graph with which a run resumes. Beside it, in interleaved rounds on the same disk: O_DIRECT
writes of as many bytes into a preallocated file that was written before, with fdatasync, and O_DIRECT reads
of them, by one thread, 4 or 8 MiB at a time, whichever is faster; torch.save, safetensors and
torch.distributed.checkpoint of the same tensors, with fsync, read back with their pages dropped from the
cache. Prints GB/s, medians, and ratios to the disk (limits 0.85 and 0.9).

`cost`: steps of a run in turn: without a commit, with one, and with one and a snapshot. Where a step is
stored by the next one, a step with a commit is one of a run that commits every step: it stores the step
before and sums what the next one will store. Prints what a commit (limit 3 %) and a snapshot (limit 2 % of
that step where state is in RAM) add to a step, and by how much a snapshot every `--every` steps slows the run
(limit 5 %).

Peers are in the extra `peers`. Exit code 1 when a limit is missed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from fresh_engine import fresh_engine, random_batches, set_up_process

if TYPE_CHECKING:
    from packmule.engine.engine import Engine

LEAST_WRITE, LEAST_READ = 0.85, 0.9
MOST_COMMIT, MOST_BLOCK, MOST_SLOW = 0.03, 0.02, 0.05
STEP, COMMIT, KEPT = "step", "step, commit", "step, commit, snapshot"
CYCLE = (STEP, STEP, COMMIT, COMMIT, KEPT, COMMIT)
LENGTH = 512
MIB = 1 << 20
CHUNKS = (4 * MIB, 8 * MIB)
SHAPE = {
    "model_type": "llama", "hidden_size": 576, "intermediate_size": 1536, "vocab_size": 49152,
    "num_attention_heads": 9, "num_key_value_heads": 3, "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6, "tie_word_embeddings": True,
}  # fmt: skip


def config_of(layers: int) -> dict[str, Any]:
    """A Hugging Face config.json: SmolLM2-135M's shape (30 layers) with another number of layers."""
    return {**SHAPE, "num_hidden_layers": layers}


@contextmanager
def run_of(
    config: dict[str, Any], state: str, folder: str, rows: int, weights: str = "auto"
) -> Iterator[tuple[Engine, Any]]:
    """An engine over a fresh run, as a training child has it, and what a commit records."""
    set_up_process()
    from packmule.plan.search import search
    from packmule.probe import load
    from packmule.shapes.model import ModelShape
    from packmule.spec.environment import read_environment
    from packmule.spec.job import load_job
    from packmule.train.situation import make_numerics, make_situation

    with tempfile.TemporaryDirectory(dir=folder) as name:
        hardware = load(read_environment().cache / "probe.json", name)
        shape = ModelShape.from_config(config, "benchmark")
        job = load_job(
            f"model: {{path: none-needed}}\n"
            f"train: {{output_dir: {name}, max_seq_length: {LENGTH}, global_batch_size: {rows}, "
            f"max_steps: 100, precision: bf16-mixed}}\n"
            f"optim: {{lr_scheduler: constant, max_grad_norm: 0}}\n"
            f"checkpoint: {{save_steps: 1}}\n"
            f"hardware: {{state: {state}, weights: {weights}}}\n",
            "benchmark",
        )
        numerics = make_numerics(job, hardware, 100)
        situation = make_situation(
            job, shape, hardware, hardware.ram_available_bytes, None, numerics, False, 0
        )
        plan = search(replace(situation, mean_length=float(LENGTH), evaluation_rows=())).plan
        with fresh_engine(Path(name), config, shape, plan, hardware, LENGTH) as made:
            yield made


# Speed


class DiskAlone:
    """A preallocated file that was written before, by one thread with O_DIRECT."""

    def __init__(self, path: Path, size: int) -> None:
        import numpy as np

        from packmule.tiers.disk import PosixDisk, aligned_buffer

        self.disk, self.count = PosixDisk(), size // CHUNKS[-1]
        self.bytes = self.count * CHUNKS[-1]
        # Large enough that no cache holds it, as a state is.
        self.buffer = aligned_buffer(64 * CHUNKS[-1])
        words = np.frombuffer(self.buffer, np.uint64)
        words[:] = np.random.default_rng(0).integers(0, 1 << 63, len(words), np.uint64)
        self.disk.create(path, self.bytes)
        self.handle = self.disk.open(path, write=True)
        self.write(CHUNKS[0])

    def write(self, chunk: int) -> None:
        """All of it, durable."""
        for start in range(0, self.bytes, chunk):
            self.disk.write(self.handle, self._part(start, chunk), start)
        self.disk.sync(self.handle)

    def read(self, chunk: int) -> None:
        """All of it."""
        for start in range(0, self.bytes, chunk):
            self.disk.read_into(self.handle, self._part(start, chunk), start)

    def _part(self, start: int, chunk: int) -> memoryview:
        low = start % len(self.buffer)
        return self.buffer[low : low + chunk]


class Peer:
    """A way to save and load the same tensors.

    Args:
        save: writes into a folder that is empty.
        load: brings all of it into memory.
    """

    def __init__(self, folder: Path, save: Callable[[Path], None], load: Callable[[Path], object]) -> None:
        self._folder, self._save, self._load = folder, save, load

    def write(self) -> None:
        """Into a fresh folder, durable."""
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir()
        self._save(self._folder)
        for path in (*self._files(), self._folder):
            number = os.open(path, os.O_RDONLY)
            os.fsync(number)
            os.close(number)

    def forget(self) -> None:
        """Drop its pages from the cache."""
        for path in self._files():
            number = os.open(path, os.O_RDONLY)
            os.posix_fadvise(number, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(number)

    def read(self) -> None:
        """From the disk."""
        self._load(self._folder)

    def _files(self) -> list[Path]:
        return [path for path in self._folder.rglob("*") if path.is_file()]


def peers(folder: Path, tensors: dict[str, Any]) -> dict[str, Peer]:
    """What is installed of torch.save, safetensors and torch.distributed.checkpoint."""
    import torch
    import torch.distributed.checkpoint as dcp

    def load_distributed(path: Path) -> None:
        into = {name: torch.empty_like(value) for name, value in tensors.items()}
        dcp.load(into, checkpoint_id=path, no_dist=True)

    found = {
        "torch.save": Peer(
            folder / "torch",
            lambda path: torch.save(tensors, path / "state.pt"),
            lambda path: torch.load(path / "state.pt"),
        ),
        "distributed checkpoint": Peer(
            folder / "dcp",
            lambda path: dcp.save(tensors, checkpoint_id=path / "saved", no_dist=True) and None,
            lambda path: load_distributed(path / "saved"),
        ),
    }
    try:
        from safetensors.torch import load_file, save_file
    except ImportError:
        return found
    found["safetensors"] = Peer(
        folder / "safetensors",
        lambda path: save_file(tensors, path / "state.safetensors"),
        lambda path: {name: value.clone() for name, value in load_file(path / "state.safetensors").items()},
    )
    return found


def seconds_of(run: Callable[[], object]) -> float:
    """How long it takes."""
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def measure_speed(arguments: argparse.Namespace) -> int:
    """Interleaved rounds; every contender writes, then every contender reads."""
    from packmule.engine.runtime import StepState
    from packmule.graph.kinds import BufferKind, Tier

    layers = max(1, round((arguments.gb * 1e9 / 12 - 28.3e6) / 3.54e6))
    with run_of(config_of(layers), "ram", arguments.folder, 1, "state") as (engine, progress):
        size = engine.model.residents.of_kind(BufferKind.STATE, Tier.RAM)
        folder = engine.runtime.writable.folder
        store = engine.runtime.writable

        def commit() -> None:
            engine.runtime.state = StepState(progress=progress)
            engine.programs["commit"].run()

        def restore() -> None:
            store.load()
            engine.load()

        tensors = {
            f"{block} {plane}": state
            for block, whole in enumerate(_states(engine))
            for plane, state in enumerate(whole)
        }
        alone = DiskAlone(folder / "alone.bin", size)
        others = peers(folder, tensors) if arguments.peers else {}
        writes: dict[str, list[float]] = {}
        reads: dict[str, list[float]] = {}
        for _ in range(arguments.rounds + 1):
            for chunk in CHUNKS:
                writes.setdefault(f"disk, {chunk // MIB} MiB", []).append(
                    alone.bytes / seconds_of(lambda chunk=chunk: alone.write(chunk))
                )
            writes.setdefault("packmule", []).append(size / seconds_of(commit))
            for name, peer in others.items():
                writes.setdefault(name, []).append(size / seconds_of(peer.write))
                peer.forget()
            for chunk in CHUNKS:
                reads.setdefault(f"disk, {chunk // MIB} MiB", []).append(
                    alone.bytes / seconds_of(lambda chunk=chunk: alone.read(chunk))
                )
            reads.setdefault("packmule", []).append(size / seconds_of(restore))
            for name, peer in others.items():
                reads.setdefault(name, []).append(size / seconds_of(peer.read))
        cpu, chunk_bytes = engine.model.plan.numerics.threads, engine.model.plan.io.chunk_bytes
    print(
        f"{size / 1e9:.2f} GB of state in RAM, chunks of {chunk_bytes / MIB:g} MiB, {cpu} threads, "
        f"{arguments.rounds} rounds after one that is not counted"
    )
    ok = True
    for word, rates, least in (("commit", writes, LEAST_WRITE), ("restore", reads, LEAST_READ)):
        counted = {name: found[1:] for name, found in rates.items()}
        middle = {name: median(found) for name, found in counted.items()}
        limit = max(rate for name, rate in middle.items() if name.startswith("disk"))
        print(f"\n{word:24} GB/s   of the disk   rounds")
        for name, rate in middle.items():
            missed = name == "packmule" and rate < least * limit
            ok = ok and not missed
            rounds = " ".join(f"{found / 1e9:.2f}" for found in counted[name])
            note = f"  (limit {least}){'  MISSED' if missed else ''}" if name == "packmule" else ""
            print(f"{name:24} {rate / 1e9:4.2f}   {rate / limit:11.2f}   {rounds}{note}")
    return 0 if ok else 1


def _states(engine: Engine) -> Iterator[list[Any]]:
    """Per block, its resident planes: float32 tensors."""
    import torch

    from packmule.graph.kinds import BufferKind, Tier

    model = engine.model
    for block in model.blocks:
        low, size = model.residents.places[BufferKind.STATE, Tier.RAM, block.index, -1]
        whole = engine.runtime.memory[Tier.RAM][low : low + size].view(torch.float32)
        yield list(whole.view(len(model.planes), -1).unbind())


# Cost


def counts_as(late: bool, before: str, mine: str) -> str | None:
    """What a step of the cycle stands for.

    Args:
        late: it stores what the step before asked for, and sums what it asks for itself: both must do so,
            or neither.
        before, mine: what the step before and this one ask for.
    """
    if not late:
        return mine
    return before if (before == STEP) == (mine == STEP) else None


def measure_cost(arguments: argparse.Namespace) -> int:
    """Steps in turn: without a commit, with one, with one and a snapshot."""

    from packmule.optim.rule import Update

    rows = arguments.tokens // LENGTH
    with run_of(config_of(arguments.layers), arguments.state, arguments.folder, rows) as (engine, progress):
        plan, shape = engine.model.plan, engine.model.decoder
        batches = random_batches(plan, shape.vocab, LENGTH)
        seconds: dict[str, list[float]] = {}
        for step in range(1, len(CYCLE) * (arguments.rounds + 1) + 1):
            before, mine = CYCLE[(step - 2) % len(CYCLE)], CYCLE[(step - 1) % len(CYCLE)]
            now = progress.model_copy(update={"step": step})
            took = seconds_of(
                lambda now=now, mine=mine, step=step: engine.step(
                    batches, rows * (LENGTH - 1), Update(step, 1e-4), now,
                    commit=mine != STEP, snapshot=mine == KEPT,
                )
            )  # fmt: skip
            name = counts_as(plan.commits_late, before, mine)
            if step > len(CYCLE) and name is not None:
                seconds.setdefault(name, []).append(took)
    plain, commit, kept = (median(seconds[name]) for name in (STEP, COMMIT, KEPT))
    place = plan.placement
    size = 12 * shape.numel
    print(
        f"{shape.numel / 1e6:.0f}M parameters, {arguments.tokens} tokens a step, {plan.numerics.threads} "
        f"threads\nplan      state {place.state} ({size / 1e9:.2f} GB), {plan.update}, "
        f"weights {place.weights}, gradients {place.gradients}, inputs {place.inputs}"
    )
    for name in (STEP, COMMIT, KEPT):
        each = " ".join(f"{value:.2f}" for value in seconds[name])
        print(f"{name:24} {median(seconds[name]):6.2f} s   ({each})")
    ok = True
    limits = [("a commit adds to its step", commit / plain - 1, MOST_COMMIT)]
    if plan.placement.state == "ram":
        limits.append(("a snapshot adds to its step", kept / commit - 1, MOST_BLOCK))
    else:
        print(f"{'a snapshot adds to its step':40} {100 * (kept / commit - 1):6.2f} %")
    limits.append(
        (f"one every {arguments.every} steps slows the run", (kept / commit - 1) / arguments.every, MOST_SLOW)
    )
    for text, value, most in limits:
        print(f"{text:40} {100 * value:6.2f} % (limit {100 * most:g} %){'' if value <= most else '  MISSED'}")
        ok = ok and value <= most
    return 0 if ok else 1


def main() -> int:
    """Measure, print, compare."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("speed", "cost"), nargs="?", default="speed")
    parser.add_argument("--gb", type=float, default=2.0, help="of state, for speed")
    parser.add_argument("--peers", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--state", choices=("ram", "disk"), default="ram", help="for cost")
    parser.add_argument("--layers", type=int, default=30, help="for cost: 30 are 135M parameters")
    parser.add_argument("--tokens", type=int, default=2048, help="of a step, for cost")
    parser.add_argument("--every", type=int, default=10, help="steps between two snapshots, for cost")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", default=".", help="on the disk to use")
    arguments = parser.parse_args()
    return measure_speed(arguments) if arguments.what == "speed" else measure_cost(arguments)


if __name__ == "__main__":
    sys.exit(main())
