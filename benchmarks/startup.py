"""CPU time of `import packmule` and `packmule plan --help` above bare Python, against their limits.

    python benchmarks/startup.py

Best of seven runs each, user + system time of the child (getrusage, not wall time). Exit code 1
when a limit is broken.
"""

from __future__ import annotations

import resource
import subprocess
import sys

RUNS = 7
LIMITS = {"import packmule": 0.030, "packmule plan --help": 0.150}
PROGRAMS = {
    "bare python": "pass",
    "import packmule": "import packmule",
    "packmule plan --help": "from packmule.cli import main; main(['plan', '--help'])",
}


def cpu_seconds(program: str) -> float:
    """User + system seconds of one child that runs the program."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", program], check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def measure(runs: int = RUNS) -> dict[str, float]:
    """Best CPU seconds per program; programs take turns so that noise hits all alike."""
    best = dict.fromkeys(PROGRAMS, float("inf"))
    for _ in range(runs):
        for name, program in PROGRAMS.items():
            best[name] = min(best[name], cpu_seconds(program))
    return best


def main() -> int:
    best = measure()
    bare = best["bare python"]
    print(f"{'':22} {'CPU ms':>7} {'above bare':>11} {'limit':>6}")
    print(f"{'bare python':22} {bare * 1e3:7.1f}")
    for name, limit in LIMITS.items():
        above = best[name] - bare
        verdict = "" if above < limit else "  over"
        print(f"{name:22} {best[name] * 1e3:7.1f} {above * 1e3:11.1f} {limit * 1e3:6.0f}{verdict}")
    return int(any(best[name] - bare >= limit for name, limit in LIMITS.items()))


if __name__ == "__main__":
    raise SystemExit(main())
