"""Training steps of a model that fits in memory, beside transformers with torch's fused AdamW.

    python benchmarks/train_in_memory.py --shape 374m --precision bf16-mixed

Each contender runs in a process of its own, one after the other, in rounds; steady steps (the
first two of each process, which fault memory in, are left out). Contenders:

    plain     transformers + torch.optim.AdamW(fused=True), autocast for bf16
    tuned     the same with glibc told to keep its memory (MALLOC_MMAP_MAX_=0, ...)
    packmule  no clipping, as the planner fits it into 0.6 times plain's memory
    clipped   packmule with clipping at 1.0 and recomputation, within 6.5 GiB

Prints seconds, ratios to the peers, the share of the matmul rate measured in the same run (for
bf16 the faster of bfloat16's and float32's), and peak memory. Peers are in the extra `peers`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fresh_engine import fresh_engine, random_batches, set_up_process

SHAPES = {
    "374m": {
        "hidden_size": 1024, "num_hidden_layers": 24, "intermediate_size": 2816, "vocab_size": 32000,
        "num_attention_heads": 16, "num_key_value_heads": 16, "tie_word_embeddings": False,
    },
    "135m": {
        "hidden_size": 576, "num_hidden_layers": 30, "intermediate_size": 1536, "vocab_size": 49152,
        "num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True,
    },
}  # fmt: skip
ROWS, LENGTH = 4, 512
GIB = 1 << 30
WARM_UP = 2
TUNED = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": "100000000000",
    "MALLOC_TOP_PAD_": "268435456",
}


def config_of(shape: str) -> dict[str, object]:
    """A Hugging Face config.json."""
    return {"model_type": "llama", "max_position_embeddings": LENGTH, "rms_norm_eps": 1e-6, **SHAPES[shape]}


def peak_bytes() -> int:
    """VmHWM of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


def run_peer(shape: str, precision: str, steps: int) -> dict[str, object]:
    """transformers, as a user would write the loop."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**config_of(shape), use_cache=False)).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    ids = torch.randint(0, int(SHAPES[shape]["vocab_size"]), (ROWS, LENGTH))
    seconds = []
    for _ in range(steps + WARM_UP):
        began = time.perf_counter()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bf16-mixed"):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - began)
    return {"seconds": seconds[WARM_UP:], "peak": peak_bytes(), "loss": float(loss.detach())}


def run_packmule(
    shape: str, precision: str, steps: int, clip: float | None, budget: int
) -> dict[str, object]:
    """The engine under the plan that the planner finds for a budget."""
    set_up_process()

    from packmule.optim.rule import Update
    from packmule.plan.search import search
    from packmule.probe import load
    from packmule.shapes.model import ModelShape
    from packmule.spec.environment import read_environment
    from packmule.spec.job import load_job
    from packmule.train.situation import make_numerics, make_situation

    with tempfile.TemporaryDirectory(dir=Path.cwd()) as name:
        hardware = load(read_environment().cache / "probe.json", name)
        config = config_of(shape)
        model_shape = ModelShape.from_config(config, "benchmark")
        job = load_job(
            f"model: {{path: none-needed}}\n"
            f"train: {{output_dir: {name}, max_seq_length: {LENGTH}, global_batch_size: {ROWS}, "
            f"max_steps: {steps + WARM_UP}, "
            f"precision: {precision}, recompute: {'auto' if clip is None else 'true'}}}\n"
            f"optim: {{learning_rate: 1e-4, lr_scheduler: constant, max_grad_norm: {clip or 0}}}\n"
            "checkpoint: {commit_steps: 1000}\n"
            f"hardware: {{state: ram}}\n",
            "benchmark",
        )
        numerics = make_numerics(job, hardware, steps + WARM_UP)
        situation = make_situation(job, model_shape, hardware, budget, None, numerics, False, 0)
        # Alone in its process: what the parent of a run would take is not there.
        situation = replace(
            situation,
            mean_length=float(LENGTH),
            hardware=hardware.model_copy(update={"parent_baseline_bytes": 0}),
        )
        plan = search(situation).plan
        batches = random_batches(plan, model_shape.vocab, LENGTH)
        targets = sum(plan.numerics.micro_rows) * (LENGTH - 1)
        with fresh_engine(Path(name), config, model_shape, plan, hardware, LENGTH) as (engine, progress):
            seconds = []
            for step in range(steps + WARM_UP):
                began = time.perf_counter()
                result = engine.step(batches, targets, Update(step + 1, 1e-4), progress, commit=False)
                seconds.append(time.perf_counter() - began)
    return {
        "seconds": seconds[WARM_UP:], "peak": peak_bytes(), "loss": result.outcome.loss,
        "plan": f"products in {plan.numerics.products or precision}, {plan.update}, "
        f"weights {plan.placement.weights}, {sum(plan.recompute)} layers recomputed, "
        f"micro-batches {'+'.join(map(str, plan.numerics.micro_rows))}",
    }  # fmt: skip


def measured_matmul(precision: str) -> float:
    """FLOP/s of a large square product, right now."""
    import torch

    n, best = 2048, 1e9
    for dtype in (torch.float32, torch.bfloat16) if precision == "bf16-mixed" else (torch.float32,):
        a = torch.randn(n, n).to(dtype)
        for _ in range(6):
            began = time.perf_counter()
            torch.mm(a, a)
            best = min(best, time.perf_counter() - began)
    return 2 * n**3 / best


def step_flops(shape: str) -> float:
    """Matmul FLOPs of a step (6 per weight and token; no embedding look-up) and attention's."""
    c = SHAPES[shape]
    hidden, layers, ffn = int(c["hidden_size"]), int(c["num_hidden_layers"]), int(c["intermediate_size"])
    heads, kv = int(c["num_attention_heads"]), int(c["num_key_value_heads"])
    weights = layers * (2 * hidden * hidden + 2 * hidden * hidden * kv // heads + 3 * hidden * ffn)
    weights += hidden * int(c["vocab_size"])
    attention = layers * 3.5 * 2 * LENGTH * hidden
    return ROWS * LENGTH * (6.0 * weights + attention)


def contender(name: str, shape: str, precision: str, steps: int, ceiling: int) -> dict[str, Any]:
    """Run one contender in a process of its own."""
    variables = dict(os.environ)
    if name == "tuned":
        variables |= TUNED
    command = [sys.executable, __file__, "--role", name, "--shape", shape, "--precision", precision]
    command += ["--steps", str(steps), "--ceiling", str(ceiling)]
    done = subprocess.run(command, env=variables, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{name} failed:\n{done.stderr[-3000:]}")
    return dict(json.loads(done.stdout.strip().splitlines()[-1]))


def main() -> None:
    """Print one table per shape and precision."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=[*SHAPES, "all"], default="all")
    parser.add_argument("--precision", choices=["bf16-mixed", "fp32", "all"], default="all")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--role", help=argparse.SUPPRESS)
    parser.add_argument("--ceiling", type=int, default=0, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.role in ("plain", "tuned"):
        print(json.dumps(run_peer(given.shape, given.precision, given.steps)))
        return
    if given.role:
        clip = 1.0 if given.role == "clipped" else None
        print(json.dumps(run_packmule(given.shape, given.precision, given.steps, clip, given.ceiling)))
        return
    shapes = list(SHAPES) if given.shape == "all" else [given.shape]
    precisions = ["bf16-mixed", "fp32"] if given.precision == "all" else [given.precision]
    for shape in shapes:
        for precision in precisions:
            compare(shape, precision, given.steps, given.rounds)


@dataclass
class Column:
    """One contender's rounds."""

    seconds: list[float] = field(default_factory=list)
    peak: float = 0.0
    plan: str = ""


def compare(shape: str, precision: str, steps: int, rounds: int) -> None:
    """All contenders, in rounds."""
    columns = {name: Column() for name in ("plain", "tuned", "packmule", "clipped")}
    rates = []
    for _ in range(rounds):
        for name, column in columns.items():
            ceiling = int(0.6 * columns["plain"].peak) if name == "packmule" else int(6.5 * GIB)
            found = contender(name, shape, precision, steps, ceiling)
            column.seconds += found["seconds"]
            column.peak = max(column.peak, found["peak"])
            column.plan = found.get("plan", "")
            rates.append(measured_matmul(precision))
    limit = step_flops(shape) / max(rates)
    print(
        f"\n{shape}, {precision}, {ROWS * LENGTH} tokens a step, {os.cpu_count()} CPUs; "
        f"matmul {max(rates) / 1e9:.0f} GFLOP/s, so a step takes at least {limit:.2f} s"
    )
    heads = (("seconds", 9), ("min..max", 16), ("of limit", 10), ("vs plain", 10), ("vs tuned", 10))
    heads = (*heads, ("peak GiB", 10), ("of plain", 10))
    print(f"{'':<10}" + "".join(f"{head:>{width}}" for head, width in heads))
    medians = {name: statistics.median(column.seconds) for name, column in columns.items()}
    for name, column in columns.items():
        spread = f"{min(column.seconds):.2f}..{max(column.seconds):.2f}"
        print(
            f"{name:<10}{medians[name]:>9.2f}{spread:>16}{limit / medians[name]:>10.0%}"
            f"{medians['plain'] / medians[name]:>9.2f}x{medians['tuned'] / medians[name]:>9.2f}x"
            f"{column.peak / GIB:>10.2f}{column.peak / columns['plain'].peak:>10.2f}",
            flush=True,
        )
    for name in ("packmule", "clipped"):
        print(f"{name}: {columns[name].plan}", flush=True)


if __name__ == "__main__":
    main()
