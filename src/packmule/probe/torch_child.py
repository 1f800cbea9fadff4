"""The measurements that need torch, in a process of their own.

Run as `python -m packmule.probe.torch_child [--threads N] [--seconds S] [--ram-bytes B]`; prints
one JSON line. Memory first, while the process is fresh; then speed.

    baseline_bytes             of a training child after the bodies of a tiny layer have run
    matmul                     by dtype, pairs of (size, FLOP/s)
    memory_bytes_per_second    a copy with all threads, bytes read + bytes written
    task_seconds               handing a task to another thread, running it, hearing back
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import queue
import statistics
import threading
import time
from collections.abc import Callable
from typing import Any

from packmule.probe.cuda import cuda_devices

DTYPES = ("float32", "bfloat16", "float64")
SIZES = (256, 512, 1024, 2048)

_LEAST_RUNS = 3
_MOST_RUNS = 50
_ROUNDS = 2
_TASKS = 300


def baseline_bytes(threads: int) -> int:
    """VmRSS in bytes of a training child that holds nothing of a model yet.

    The child's own code says what that is; it lies above this package, so it is loaded by name.
    """
    return int(importlib.import_module("packmule.train.baseline").peak_bytes(threads))


def matmul_points(
    sizes: tuple[int, ...], seconds: float, dtypes: tuple[str, ...] = DTYPES
) -> dict[str, list[tuple[int, float]]]:
    """FLOP/s of (n x n) @ (n x n) by dtype, for each n.

    Args:
        sizes: n, ascending.
        seconds: for everything together. A size that would take more than its dtype's share by
            itself, going by the size before, is left out; the first never is. Where others
            slow the machine down, no more sizes are begun after twice that.
        dtypes: names of torch dtypes.
    """
    fastest: dict[tuple[str, int], float] = {}
    share = seconds / len(dtypes) / _ROUNDS
    started = time.perf_counter()
    # Rounds apart in time: a short disturbance spoils one of them at most.
    for _ in range(_ROUNDS):
        for dtype in dtypes:
            rate = 0.0
            for n in sizes:
                flops = 2.0 * n**3
                late = time.perf_counter() - started > 2 * seconds
                if rate and (late or (_LEAST_RUNS + 1) * flops / rate > share):
                    break
                taken = _matmul_seconds(dtype, n, share / len(sizes))
                fastest[dtype, n] = min(taken, fastest.get((dtype, n), taken))
                rate = flops / taken
    return {
        dtype: [(n, 2.0 * n**3 / fastest[dtype, n]) for n in sizes if (dtype, n) in fastest]
        for dtype in dtypes
    }


def _matmul_seconds(dtype: str, n: int, seconds: float) -> float:
    import torch

    a, b = (torch.randn(n, n).to(getattr(torch, dtype)) for _ in range(2))
    out = torch.empty_like(a)
    return _undisturbed_seconds(lambda: torch.mm(a, b, out=out), seconds)


def copy_bytes_per_second(nbytes: int, seconds: float) -> float:
    """Bytes read plus bytes written per second while `nbytes` are copied with all threads."""
    import torch

    source = torch.ones(nbytes, dtype=torch.uint8)
    target = torch.zeros_like(source)
    return 2.0 * nbytes / _undisturbed_seconds(lambda: target.copy_(source), seconds)


def task_seconds() -> float:
    """Median seconds to hand one task to another thread, run a tiny torch operation there, hear back."""
    import torch

    tasks: queue.SimpleQueue[Callable[[], Any] | None] = queue.SimpleQueue()
    done: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def work() -> None:
        while (body := tasks.get()) is not None:
            done.put(body())

    a, out = torch.ones(8), torch.empty(8)
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    times = []
    for _ in range(_TASKS):
        started = time.perf_counter()
        tasks.put(lambda: torch.add(a, a, out=out))
        done.get()
        times.append(time.perf_counter() - started)
    tasks.put(None)
    thread.join()
    return statistics.median(times)


def _undisturbed_seconds(run: Callable[[], Any], seconds: float) -> float:
    """Seconds that a tenth of the runs stay below: at least three runs after one that warms up.

    With a thread per CPU, whatever else runs makes a whole team wait at its barrier: on two
    cores one busy program makes the median ten times longer and leaves the fast runs alone.
    """
    run()
    times: list[float] = []
    started = time.perf_counter()
    while len(times) < _LEAST_RUNS or (len(times) < _MOST_RUNS and time.perf_counter() - started < seconds):
        begin = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin)
    return sorted(times)[len(times) // 10]


def main(arguments: list[str] | None = None) -> None:
    """Measure and print. See the module's first lines."""
    parser = argparse.ArgumentParser(prog="packmule.probe.torch_child", description="torch measurements")
    parser.add_argument("--threads", type=int, help="threads torch uses; its own choice when left out")
    parser.add_argument("--seconds", type=float, default=8.0, help="about how long the timing may take")
    parser.add_argument("--ram-bytes", type=int, default=1 << 30, help="memory the timing may use")
    parser.add_argument("--largest", type=int, default=SIZES[-1], help="the largest matrix")
    options = parser.parse_args(arguments)

    # First: it sets up malloc and libraries, which must happen before torch is imported.
    baseline = baseline_bytes(options.threads or len(os.sched_getaffinity(0)))
    import torch

    if options.threads:
        torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    # Four matrices of the largest size may live at once (float32 before it is converted).
    sizes = tuple(n for n in SIZES if n <= options.largest and 4 * 8 * n * n <= options.ram_bytes)
    matmul = matmul_points(sizes or SIZES[:1], 0.8 * options.seconds)
    copied = max(1 << 20, min(256 << 20, options.ram_bytes // 2))
    answer = {
        "baseline_bytes": baseline,
        "matmul": matmul,
        "memory_bytes_per_second": copy_bytes_per_second(copied, 0.1 * options.seconds),
        "task_seconds": task_seconds(),
        "devices": cuda_devices(0.1 * options.seconds),
    }
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
