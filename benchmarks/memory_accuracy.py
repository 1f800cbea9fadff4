"""Predicted against measured peak memory of whole runs, over random jobs with tight budgets.

    python benchmarks/memory_accuracy.py --jobs 20 --seed 0 [--json]

Each job is a random Llama with random weights that needs at least 1 GB above what Python and
torch take, trained for a few steps by the command line. Its budget is the least it can run in,
times a random factor from 1 to 1.3. The peak is the sum of VmHWM over the live processes of the
run, read from /proc by this process every few milliseconds; runs are also asked what they
measured themselves. Memory does not depend on speed, so other work may go on meanwhile.

    error    (predicted - measured) / (measured - baseline)
    limits   worst 8 %, median 4 %, no peak above its budget

Exit code 1 when a limit is broken.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

WORST, MEDIAN = 0.08, 0.04
LEAST_BYTES = 1_000_000_000
POLL_SECONDS = 0.01
RUN_SECONDS = 600
WORDS = ("mule", "pack", "load", "road", "stone", "river", "bridge", "north", "rope", "hill")


@dataclass(frozen=True)
class Outcome:
    """One job; bytes. `measured` is from outside, `reported` from the run's report.json."""

    job: str
    plan: str
    budget: int
    baseline: int
    predicted: int
    measured: int
    reported: int
    seconds: float

    @property
    def error(self) -> float:
        """Of the part that planning decides: what is above the baseline."""
        return (self.predicted - self.measured) / (self.measured - self.baseline)

    @property
    def kept(self) -> bool:
        """Whether the peak stayed within the budget."""
        return self.measured <= self.budget


def write_model(folder: Path, config: dict[str, Any]) -> None:
    """config.json and a byte-level tokenizer: random weights need no more."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate(["<end>", *alphabet])}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.add_special_tokens(["<end>"])
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.save(str(folder / "tokenizer.json"))
    stated = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(stated))


def write_texts(path: Path, rng: random.Random, tokens: int, longest: int) -> None:
    """Documents of random lengths, about `tokens` bytes together; a byte is a token."""
    lines, written = [], 0
    while written < tokens:
        size = rng.randint(16, 2 * longest)
        text = " ".join(rng.choice(WORDS) for _ in range(size // 5 + 1))[:size]
        lines.append(json.dumps({"text": text}))
        written += len(text)
    path.write_text("\n".join(lines) + "\n")


def random_config(rng: random.Random, kind: str) -> dict[str, Any]:
    """A Llama of about 60 to 150 million parameters; for `blocks`, most in a large embedding."""
    head = rng.choice((32, 64, 128))
    hidden = rng.choice((512, 768, 1024))
    group = rng.choice((1, 2, 4))
    ffn = 64 * rng.randint(hidden // 32, hidden // 16)
    tied = rng.random() < 0.5
    vocab = rng.choice((260, 1000, 8192, 16001))
    if kind == "blocks":
        tied, vocab = True, rng.randint(90_000_000, 140_000_000) // hidden
    heads = hidden // head
    per_layer = hidden * hidden * 2 + 2 * hidden * head * (heads // group) + 3 * hidden * ffn
    least, most = {"blocks": (8e6, 20e6), "state": (88e6, 150e6), "weights": (140e6, 180e6)}[kind]
    outer = 0 if kind == "blocks" else vocab * hidden * (1 if tied else 2)
    layers = max(1, round((rng.uniform(least, most) - outer) / per_layer))
    return {
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": max(1, heads // group),
        "head_dim": head,
        "vocab_size": vocab,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": tied,
    }


def random_job(rng: random.Random, folder: Path) -> tuple[dict[str, Any], str]:
    """A job (sections of a job file) and what it is in a few words."""
    kind = rng.choice(("state", "state", "weights", "blocks"))
    config = random_config(rng, kind)
    precision = rng.choice(("fp32", "bf16-mixed"))
    length = rng.choice((64, 128, 256))
    rows = rng.choice((2, 4)) if length < 256 else 2
    clip = rng.choice((0.0, 1.0))
    evaluates, samples = rng.random() < 0.5, rng.random() < 0.5
    hardware: dict[str, str] = {}
    if kind == "state":
        hardware["state"] = "ram"
    elif kind == "weights":
        hardware |= {"state": "disk", "weights": "ram"}
        if clip:
            hardware["gradients"] = "ram"
        else:
            precision = "fp32"
    else:
        hardware |= {"state": "disk", "inputs": rng.choice(("ram", "disk"))}
    train: dict[str, Any] = {
        "output_dir": str(folder / "run"),
        "max_seq_length": length,
        "global_batch_size": rows,
        "max_steps": rng.choice((2, 3)),
        "precision": precision,
        "seed": rng.randrange(1000),
        "recompute": rng.choice(("auto", True, False)),
        "update": rng.choice(("auto", "after-backward", "on-fetch") if clip else ("auto", "after-backward")),
    }
    if samples:
        train |= {"sample_prompt": "the mule", "sample_tokens": rng.randint(4, 20)}
    if evaluates:
        train["eval_rows"] = rng.randint(1, 6)
    write_model(folder / "model", config)
    write_texts(folder / "text.jsonl", rng, 40 * rows * length, length)
    job = {
        "model": {"path": str(folder / "model"), "init": "random"},
        "data": {"path": str(folder / "text.jsonl"), "val_size": 0.1 if evaluates else 0},
        "train": train,
        "optim": {"learning_rate": 1e-4, "max_grad_norm": clip},
        "hardware": hardware,
    }
    shape = "{num_hidden_layers} x {hidden_size}/{intermediate_size}, vocabulary {vocab_size}".format(
        **config
    )
    name = f"{kind}: {shape}, {precision}, {rows} x {length}"
    name += "".join(
        word for word, on in ((", clip", clip), (", eval", evaluates), (", sample", samples)) if on
    )
    return job, name


def tree(root: int) -> list[int]:
    """A live process and its descendants."""
    found, queue = [], [root]
    while queue:
        pid = queue.pop()
        found.append(pid)
        try:
            for task in os.listdir(f"/proc/{pid}/task"):
                children = Path(f"/proc/{pid}/task/{task}/children").read_text()
                queue += [int(child) for child in children.split()]
        except OSError:
            continue
    return found


def peak_of(pid: int) -> int:
    """VmHWM of a process; 0 when it has ended."""
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    found = re.search(r"VmHWM:\s+(\d+) kB", text)
    return 1024 * int(found[1]) if found else 0


def run_tool(arguments: list[str], log: Path) -> tuple[int, int]:
    """Run packmule; (exit code, the most that VmHWM of its live processes added up to)."""
    code = "import sys; from packmule.cli import main; sys.exit(main(sys.argv[1:]))"
    peak = 0
    deadline = time.monotonic() + RUN_SECONDS
    with open(log, "w") as output:
        process = subprocess.Popen(
            [sys.executable, "-c", code, *arguments],
            stdout=output,
            stderr=subprocess.STDOUT,
            preexec_fn=lambda: os.nice(10) and None,
        )
        while process.poll() is None:
            peak = max(peak, sum(peak_of(pid) for pid in tree(process.pid)))
            if time.monotonic() > deadline:
                process.terminate()
            time.sleep(POLL_SECONDS)
    return process.returncode, peak


def run_job(number: int, seed: int, folder: Path) -> Outcome | str:
    """One job, twice: refused for its least budget, then run; or why it did not run."""
    rng = random.Random(f"{seed}/{number}")
    job, name = random_job(rng, folder)
    path, log = folder / "job.yaml", folder / "log.txt"
    path.write_text(json.dumps(job))  # JSON is YAML
    run_tool(["train", str(path), "--ram", "1MB", "--quiet"], log)
    needs = re.search(r"needs at least ([\d.]+) ([MG])B", log.read_text())
    if needs is None:
        return f"{name}: no least budget: {log.read_text()[-600:]}"
    least = 1.005 * float(needs[1]) * (1e9 if needs[2] == "G" else 1e6)  # it is rounded to 3 digits
    budget = int(least * rng.uniform(1.0, 1.3))
    began = time.monotonic()
    code, measured = run_tool(["train", str(path), "--ram", str(budget), "--quiet"], log)
    seconds = time.monotonic() - began
    if code:
        return f"{name}: exit code {code}: {log.read_text()[-600:]}"
    plan = json.loads((folder / "run/plan.json").read_text())
    report = json.loads((folder / "run/report.json").read_text())
    predicted = plan["predicted"]
    baseline = next(p for p in predicted["phases"] if p["phase"] == "step")["parts"]["baseline"]
    place = plan["placement"]
    choice = f"{plan['update']}, {plan['order']}, " + " ".join(f"{k}={v}" for k, v in place.items())
    return Outcome(
        name, choice, budget, baseline, predicted["peak_ram_bytes"], measured,
        int(report["terms"]["peak_ram_bytes"]["measured"]), seconds,
    )  # fmt: skip


def show(number: int, found: Outcome) -> str:
    """One line."""
    verdict = "kept" if found.kept else "OVER"
    if found.measured - found.baseline < LEAST_BYTES:
        verdict += ", below 1 GB: not counted"
    return (
        f"{number:3}  predicted {found.predicted / 1e6:7.0f} MB  measured {found.measured / 1e6:7.0f} MB  "
        f"above baseline {(found.measured - found.baseline) / 1e6:6.0f} MB  error {found.error:+7.1%}  "
        f"budget {found.budget / 1e6:7.0f} MB {verdict}  ({found.seconds:.0f} s)\n"
        f"     {found.job}; {found.plan}"
    )


def summary(outcomes: list[Outcome], failures: list[str]) -> dict[str, Any]:
    """Median and worst error of the jobs that count, and how many broke their budget."""
    errors = [abs(o.error) for o in outcomes if o.measured - o.baseline >= LEAST_BYTES]
    return {
        "jobs": len(outcomes),
        "counted": len(errors),
        "failed": len(failures),
        "median_error": statistics.median(errors) if errors else None,
        "worst_error": max(errors, default=None),
        "over_budget": sum(not o.kept for o in outcomes),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="predicted against measured peak memory")
    parser.add_argument("--jobs", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first job")
    parser.add_argument("--json", action="store_true", help="print JSON only")
    parser.add_argument(
        "--folder", type=Path, help="where runs go, one at a time; a temporary folder by default"
    )
    options = parser.parse_args()
    outcomes: list[Outcome] = []
    failures: list[str] = []
    with tempfile.TemporaryDirectory(prefix="packmule-memory-", dir=options.folder) as name:
        for number in range(options.first, options.first + options.jobs):
            folder = Path(name) / str(number)
            folder.mkdir()
            found = run_job(number, options.seed, folder)
            shutil.rmtree(folder)
            (outcomes if isinstance(found, Outcome) else failures).append(found)  # type: ignore[arg-type]
            if not options.json:
                print(
                    show(number, found) if isinstance(found, Outcome) else f"{number:3}  FAILED {found}",
                    flush=True,
                )
    result = summary(outcomes, failures)
    if options.json:
        records = [{**asdict(o), "error": o.error, "kept": o.kept} for o in outcomes]
        print(
            json.dumps({"seed": options.seed, **result, "outcomes": records, "failures": failures}, indent=2)
        )
    elif result["counted"]:
        print(
            f"\nseed {options.seed}: {result['jobs']} jobs, {result['counted']} counted; error median "
            f"{result['median_error']:.1%}, worst {result['worst_error']:.1%}; "
            f"{result['over_budget']} over budget, {result['failed']} failed"
        )
    good = bool(result["counted"]) and not result["over_budget"] and not failures
    return int(not (good and result["median_error"] <= MEDIAN and result["worst_error"] <= WORST))


if __name__ == "__main__":
    raise SystemExit(main())
