"""CPU time of `import packmule` and `packmule plan --help` above bare Python, in bare Pythons.

    python benchmarks/startup.py

Best of seven runs each, user + system time of the child (getrusage, not wall time). The limits are
multiples of what bare Python takes in the same minute: a shared machine may be half as fast in
the next one.
Exit code 1 when a limit is broken.
"""

from __future__ import annotations

import resource
import subprocess
import sys

RUNS = 7
LIMITS = {"import packmule": 2.0, "packmule plan --help": 12.0}
"""Above bare Python. (M: numpy alone takes 10, torch 95.)"""
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


def above_bare(best: dict[str, float]) -> dict[str, float]:
    """What each program takes above bare Python, in bare Pythons."""
    bare = best["bare python"]
    return {name: (best[name] - bare) / bare for name in LIMITS}


def main() -> int:
    best = measure()
    above = above_bare(best)
    print(f"{'':22} {'CPU ms':>7} {'above bare, in bares':>21} {'limit':>6}")
    print(f"{'bare python':22} {best['bare python'] * 1e3:7.1f}")
    for name, limit in LIMITS.items():
        verdict = "" if above[name] < limit else "  over"
        print(f"{name:22} {best[name] * 1e3:7.1f} {above[name]:21.1f} {limit:6.0f}{verdict}")
    return int(any(above[name] >= limit for name, limit in LIMITS.items()))


if __name__ == "__main__":
    raise SystemExit(main())
