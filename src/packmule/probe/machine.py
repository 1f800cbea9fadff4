"""`measure`: every part of the probe, one after the other, as one Hardware record."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packmule import __version__
from packmule.errors import ConfigError
from packmule.probe.busy import busy_fraction, cpu_times
from packmule.probe.child import ask
from packmule.probe.cpu import cpu_features, cpu_name, usable_threads
from packmule.probe.disk import measure_disk
from packmule.probe.ram import ram
from packmule.probe.roots import HOST, Roots
from packmule.spec.hardware import DeviceSpeed, Hardware, MatmulPoint

Progress = Callable[[str, float], None]
"""Called with what is being done now and the fraction of the probe already done."""


@dataclass(frozen=True)
class Effort:
    """How much is measured; the defaults take about ten seconds.

    Attributes:
        disk_bytes: size of the temporary file.
        disk_seconds: the most each pass over it may take.
        torch_seconds: timing in the torch process, its start not counted.
        largest_matmul: the largest matrix.
        ram_bytes: the most memory the torch process may use for timing.
    """

    disk_bytes: int = 512 << 20
    disk_seconds: float = 1.5
    torch_seconds: float = 8.0
    largest_matmul: int = 2048
    ram_bytes: int = 512 << 20


FULL = Effort()
"""What `packmule probe` does."""


def measure(
    disk_path: Path | str,
    threads: int | None = None,
    roots: Roots = HOST,
    progress: Progress | None = None,
    effort: Effort = FULL,
) -> Hardware:
    """Measure this machine, in under 30 seconds.

    Args:
        disk_path: a folder on the disk a run will use; it need not exist yet.
        threads: threads to measure with; those usable under affinity and cgroup quota when None.
        roots: where /proc and /sys are; limits are read there, speeds are always this machine's.
        progress: called before each part.
        effort: how much to measure.

    Raises:
        ConfigError: `threads` is not positive.
        DiskError: the folder cannot be measured.
        PackmuleError: a measuring process failed, or /proc cannot be read.
    """
    report = progress or (lambda doing, fraction: None)
    count = resolve_threads(threads, roots)
    report("reading the memory and CPU limits", 0.0)
    memory = ram(roots)
    before = cpu_times()
    report("measuring the disk", 0.0)  # first, because it fails soonest
    disk = measure_disk(disk_path, roots, effort.disk_bytes, effort.disk_seconds)
    report("measuring the memory a process needs", 0.3)
    parent = ask("packmule.probe.parent_child")
    report("measuring matrix products and memory", 0.35)
    timed = ask(
        "packmule.probe.torch_child",
        *("--threads", str(count)),
        *("--seconds", str(effort.torch_seconds)),
        *("--ram-bytes", str(min(effort.ram_bytes, memory.available_bytes // 4))),
        *("--largest", str(effort.largest_matmul)),
    )
    busy = busy_fraction(before, cpu_times(), count, len(os.sched_getaffinity(0)))
    report("done", 1.0)
    return Hardware(
        date=now().isoformat(timespec="seconds"),
        host=platform.node(),
        cpu=cpu_name(roots),
        cpu_features=cpu_features(roots),
        threads=count,
        ram_total_bytes=memory.total_bytes,
        ram_available_bytes=memory.available_bytes,
        ram_limit_source=memory.source,
        matmul=_points(timed["matmul"]),
        memory_bytes_per_second=timed["memory_bytes_per_second"],
        task_seconds=timed["task_seconds"],
        disks=(disk,),
        devices=tuple(DeviceSpeed.parse(found, "the probe") for found in timed["devices"]),
        parent_baseline_bytes=parent["peak_bytes"],
        child_baseline_bytes=timed["baseline_bytes"],
        software=software(),
        busy_fraction=round(busy, 3),
    )


def resolve_threads(threads: int | None, roots: Roots) -> int:
    """The threads asked for, or those usable.

    Raises:
        ConfigError: not positive.
    """
    if threads is not None and threads < 1:
        raise ConfigError(f"threads = {threads}: at least one is needed.", "leave it out to use all")
    return threads if threads is not None else usable_threads(roots)


def software() -> str:
    """Versions of what the baselines and speeds depend on, without loading it."""
    try:
        torch = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        torch = "none"
    return f"python {platform.python_version()}, torch {torch}, packmule {__version__}"


def now() -> datetime.datetime:
    """The time, in UTC."""
    return datetime.datetime.now(datetime.UTC)


def _points(matmul: dict[str, Any]) -> dict[str, tuple[MatmulPoint, ...]]:
    return {
        dtype: tuple(MatmulPoint(size=size, flops_per_second=rate) for size, rate in points)
        for dtype, points in matmul.items()
    }
