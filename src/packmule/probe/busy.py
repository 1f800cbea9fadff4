"""How much other programs got in the way while something was measured (/proc/stat, proc(5))."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Set
from dataclasses import dataclass

from packmule.probe.roots import HOST, Roots, read_text, to_int

_IDLE_COLUMNS = (3, 4)  # idle, iowait
_GUEST_COLUMNS = 8  # guest and guest_nice, from here on, are already in user and nice


@dataclass(frozen=True)
class CpuTimes:
    """CPU seconds up to one moment.

    Attributes:
        at: the moment, on a monotonic clock.
        used: by all programs, and by other machines of the same host, on the CPUs watched.
        own: by this process and its children that have ended.
    """

    at: float
    used: float
    own: float


def cpu_times(roots: Roots = HOST, cpus: Set[int] | None = None) -> CpuTimes:
    """Times now; of this process's CPUs when `cpus` is None."""
    watched = cpus if cpus is not None else os.sched_getaffinity(0)
    ticks = 0
    for line in (read_text(roots.proc_file("stat")) or "").splitlines():
        name, *columns = line.split()
        if not name.startswith("cpu") or to_int(name[3:]) not in watched:
            continue
        counts = [to_int(column) or 0 for column in columns[:_GUEST_COLUMNS]]
        ticks += sum(count for column, count in enumerate(counts) if column not in _IDLE_COLUMNS)
    own = sum(
        usage.ru_utime + usage.ru_stime
        for usage in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    )
    return CpuTimes(time.monotonic(), ticks / os.sysconf("SC_CLK_TCK"), own)


def busy_fraction(before: CpuTimes, after: CpuTimes, threads: int, cpus: int) -> float:
    """The part of `threads` threads that others kept from running, 0 to 1.

    Others do not count as long as the CPUs they leave free are enough.

    Args:
        before, after: two moments.
        threads: threads that were measured.
        cpus: CPUs watched.
    """
    elapsed = after.at - before.at
    if elapsed <= 0:
        return 0.0
    others = ((after.used - before.used) - (after.own - before.own)) / elapsed
    return min(1.0, max(0.0, others + min(threads, cpus) - cpus) / threads)
