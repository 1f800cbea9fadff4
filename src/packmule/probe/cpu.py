"""What the CPU is called, what it can do, and how many threads may run at once. Nothing is timed."""

from __future__ import annotations

import math
import os
import platform

from packmule.probe.cgroups import groups
from packmule.probe.roots import HOST, Roots, read_int, read_text, to_int

FEATURES = (
    *("avx2", "fma", "avx512f", "avx512_bf16", "amx_bf16"),  # x86-64
    *("asimd", "asimddp", "bf16", "i8mm", "sve", "sve2"),  # aarch64
)
"""Instruction sets that decide kernels and speed, by the names /proc/cpuinfo uses."""


def usable_threads(roots: Roots = HOST, affinity: int | None = None) -> int:
    """Threads that can run at once: CPUs in this process's affinity mask, or its cgroup quota if less.

    A fractional quota is rounded up: threads that share 1.5 CPUs do 1.5 CPUs of work, one does 1.

    Args:
        roots: where /proc and /sys are.
        affinity: CPUs in the affinity mask; asked from the kernel when None.
    """
    allowed = affinity if affinity is not None else len(os.sched_getaffinity(0))
    quotas = [math.ceil(quota - 1e-9) for quota in _quotas(roots)]
    return max(1, min([allowed, *quotas]))


def asked_threads(asked: int | None, variable: int | None, roots: Roots = HOST) -> int | None:
    """The threads that were asked for: by a setting, else by OMP_NUM_THREADS, as far as they can run
    at once; None: not at all.

    Args:
        asked: the setting.
        variable: the variable.
        roots: where /proc and /sys are.
    """
    if asked is not None or variable is None:
        return asked
    return min(variable, usable_threads(roots))


def cpu_name(roots: Roots = HOST) -> str:
    """The model as /proc/cpuinfo names it; on aarch64, which has no names, implementer and part."""
    fields = _first_values(roots)
    for key in ("model name", "cpu model", "cpu"):
        if fields.get(key):
            return " ".join(fields[key].split())
    machine = platform.machine() or "unknown"
    if "CPU part" in fields:
        return f"{machine} implementer {fields.get('CPU implementer', '?')} part {fields['CPU part']}"
    return machine


def cpu_features(roots: Roots = HOST) -> tuple[str, ...]:
    """Those of FEATURES that every CPU has, in that order."""
    common: set[str] | None = None
    for line in _lines(roots):
        key, _, value = line.partition(":")
        if key.strip() in ("flags", "Features"):
            flags = set(value.split())
            common = flags if common is None else common & flags
    return tuple(name for name in FEATURES if name in (common or ()))


def _quotas(roots: Roots) -> list[float]:
    """CPUs each control group may use, for those that have a quota."""
    quotas = []
    for group in groups(roots, "cpu"):
        if group.version == 2:
            words = (read_text(group.folder / "cpu.max") or "").split()
            quota = to_int(words[0]) if words else None
            period = to_int(words[1]) if len(words) > 1 else 100_000
        else:
            quota = read_int(group.folder / "cpu.cfs_quota_us")
            period = read_int(group.folder / "cpu.cfs_period_us")
        if quota is not None and period and quota > 0:
            quotas.append(quota / period)
    return quotas


def _lines(roots: Roots) -> list[str]:
    return (read_text(roots.proc_file("cpuinfo")) or "").splitlines()


def _first_values(roots: Roots) -> dict[str, str]:
    fields: dict[str, str] = {}
    for line in _lines(roots):
        key, colon, value = line.partition(":")
        if colon:
            fields.setdefault(key.strip(), value.strip())
    return fields
