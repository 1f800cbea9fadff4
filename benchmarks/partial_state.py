"""Losses, memory and time of the demo job by methods that keep part of AdamW's state.

    python benchmarks/partial_state.py [--steps 40] [--methods adamw,lomo,...] [--json]

Every method fine-tunes SmolLM2-135M on Python's documentation from the same weights on the same rows in
the same order, each by `packmule train` in processes of its own. Rates are each method's usual ones and
were not searched for; blocks that take turns are each updated in a few of the steps only. The peak is of
the whole process tree, Python and torch included. For HiFT the seconds of steps are also told by group,
from the embedding up: backward ends at the lowest block of the group. Needs examples/get_smollm2.py.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
MODEL = ROOT / "models" / "smollm2-135m-instruct.gguf"
_MAIN = "import sys; from packmule.cli import main; sys.exit(main(sys.argv[1:]))"

STREAMED = {"--hardware.state": "disk", "--hardware.weights": "ram"}
METHODS = {
    "adamw": {"--learning-rate": "1e-4", "--hardware.state": "ram"},
    "adamw on disk": {"--learning-rate": "1e-4", **STREAMED},
    "lomo": {
        "--optim": "lomo", "--learning-rate": "1e-2", "--max-grad-norm": "0", "--hardware.state": "ram",
        "--update": "on-backward",
    },
    "adalomo": {
        "--optim": "adalomo", "--learning-rate": "5e-4", "--max-grad-norm": "0", "--hardware.state": "ram",
        "--update": "on-backward",
    },
    "hift": {"--block-schedule": "hift", "--learning-rate": "1e-4", **STREAMED},
    "badam": {
        "--block-schedule": "badam", "--optim.block_steps": "4", "--optim.block_layers": "4",
        "--learning-rate": "1e-4", **STREAMED,
    },
}  # fmt: skip
"""Method -> flags beside the common ones."""


@dataclass(frozen=True)
class Row:
    """One method's run.

    Attributes:
        start, end: held-out loss before the first and after the last step.
        peak_bytes: VmHWM of the process tree.
        step_seconds: mean of a step.
        written_bytes: to disk per step.
    """

    method: str
    start: float
    end: float
    peak_bytes: int
    step_seconds: float
    written_bytes: float


def packmule(*words: str) -> str:
    """Output of a command."""
    done = subprocess.run([sys.executable, "-c", _MAIN, *words], capture_output=True, text=True, cwd=ROOT)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)}\n{done.stdout}{done.stderr}")
    return done.stdout


def run(method: str, steps: int, data: Path, folder: Path) -> tuple[Row, list[float]]:
    """A whole run; also the seconds of each step."""
    flags = {
        "--model": str(MODEL), "--dataset": str(data), "--output-dir": str(folder), "--max-steps": str(steps),
        "--max-seq-length": "128", "--global-batch-size": "2", "--train.eval_rows": "16", "--ram": "6GB",
        "--eval-steps": str(steps), "--warmup-steps": "4", "--weight-decay": "0.01", "--precision": "fp32",
        **METHODS[method],
    }  # fmt: skip
    packmule("train", *(word for pair in flags.items() for word in pair))
    log = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    losses = [entry["eval/loss"] for entry in log if "eval/loss" in entry]
    seconds = [entry["seconds"] for entry in log if "seconds" in entry]
    terms = json.loads((folder / "report.json").read_text())["terms"]
    measured = {name: term["measured"] for name, term in terms.items()}
    row = Row(
        method,
        losses[0],
        losses[-1],
        int(measured["peak_ram_bytes"]),
        float(measured["step_seconds"]),
        float(measured["disk_bytes_written_per_step"]),
    )
    return row, seconds


def main() -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if not MODEL.exists():
        print("no model: python examples/get_smollm2.py", file=sys.stderr)
        return 0
    rows = []
    with tempfile.TemporaryDirectory(dir=ROOT) as name:
        data = Path(name) / "pydocs.jsonl"
        subprocess.run([sys.executable, str(ROOT / "examples" / "make_pydocs.py"), str(data)], check=True)
        for method in options.methods.split(","):
            row, seconds = run(method, options.steps, data, Path(name) / method.replace(" ", "-"))
            rows.append(row)
            print(
                f"{row.method:14} held-out loss {row.start:.4f} -> {row.end:.4f}   "
                f"peak {row.peak_bytes / 1e9:.2f} GB"
                f"   {row.step_seconds:.2f} s per step   {row.written_bytes / 1e6:.0f} MB written per step",
                flush=True,
            )
            if method == "hift":
                count = 31  # 30 layers, and the embedding with the head that shares its weight
                groups = [
                    statistics.median(seconds[group::count]) for group in range(min(count, len(seconds)))
                ]
                print("  by group:", " ".join(f"{value:.2f}" for value in groups), flush=True)
    if options.json:
        print(json.dumps([asdict(row) for row in rows]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
