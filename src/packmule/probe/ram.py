"""How much RAM this process can really have: the least of every limit the kernel enforces.

    control groups   limit - (usage - clean file cache), for the process's group and each ancestor
    MemAvailable     what the kernel estimates can be had without swapping
    ulimit           data segment and address space of one process
    commit limit     only where the kernel refuses to overcommit

Swap is not counted anywhere. Nothing is allocated here; reading takes about a millisecond.
Sources: Linux cgroup-v1/memory.rst, cgroup-v2.rst, proc(5), getrlimit(2), overcommit-accounting.rst.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from packmule.errors import PackmuleError
from packmule.probe.cgroups import Group, groups
from packmule.probe.roots import HOST, KIB, Roots, read_int, read_numbers, read_text

NO_LIMIT_BYTES = 1 << 60
"""v1 says "no limit" as LONG_MAX rounded down to a page: 0x7ffffffffffff000, or ...0000 with 64 KiB pages."""

_NEVER_OVERCOMMIT = 2


@dataclass(frozen=True)
class Ram:
    """RAM in bytes, and the file that says so.

    Attributes:
        total_bytes: of the machine.
        available_bytes: the least headroom of all limits, never negative.
        source: the file (and key) of that limit.
    """

    total_bytes: int
    available_bytes: int
    source: str


@dataclass(frozen=True)
class Bound:
    """One limit's headroom in bytes, and the file (and key) it comes from."""

    headroom_bytes: int
    source: str


def ram(roots: Roots = HOST) -> Ram:
    """RAM this process can have now.

    Raises:
        PackmuleError: /proc/meminfo cannot be read.
    """
    path = roots.proc_file("meminfo")
    meminfo = {name: value * KIB for name, value in read_numbers(path).items()}
    if "MemTotal" not in meminfo:
        raise PackmuleError(
            f"{path} does not say how much RAM there is.", "Packmule needs Linux with /proc mounted"
        )
    bounds = [_available(meminfo, path), *_commit(meminfo, path, roots), *_process_limits(roots)]
    for group in groups(roots, "memory"):
        bounds += _group_bounds(group)
    least = min(bounds, key=lambda bound: bound.headroom_bytes)
    return Ram(meminfo["MemTotal"], max(0, least.headroom_bytes), least.source)


def _available(meminfo: dict[str, int], path: Path) -> Bound:
    estimate = meminfo.get("MemAvailable")
    if estimate is None:  # kernels before 3.14
        cache = meminfo.get("Buffers", 0) + meminfo.get("Cached", 0) - meminfo.get("Shmem", 0)
        estimate = meminfo.get("MemFree", 0) + max(0, cache)
    return Bound(estimate, str(path))


def _commit(meminfo: dict[str, int], path: Path, roots: Roots) -> list[Bound]:
    if read_int(roots.proc_file("sys/vm/overcommit_memory")) != _NEVER_OVERCOMMIT:
        return []
    if "CommitLimit" not in meminfo:
        return []
    headroom = meminfo["CommitLimit"] - meminfo.get("Committed_AS", 0)
    return [Bound(headroom, f"{path} (CommitLimit)")]


def _process_limits(roots: Roots) -> list[Bound]:
    """Limits of one process, inherited by the training child: an upper bound of what it can have."""
    path = roots.proc_file("self/limits")
    text = read_text(path) or ""
    bounds = []
    for name in ("Max data size", "Max address space"):
        match = re.search(rf"^{name}\s+(\d+)\s", text, re.MULTILINE)
        if match:
            bounds.append(Bound(int(match.group(1)), f"{path} ({name})"))
    return bounds


def _group_bounds(group: Group) -> list[Bound]:
    stat = read_numbers(group.folder / "memory.stat")
    if group.version == 2:
        limits = [(read_int(group.folder / name), name) for name in ("memory.max", "memory.high")]
        used = _unreclaimable(read_int(group.folder / "memory.current"), stat, "", "file_")
    else:
        limits = [(read_int(group.folder / "memory.limit_in_bytes"), "memory.limit_in_bytes")]
        if group.own:
            # Ancestors out of sight still count here; their usage does not show, so this is
            # an upper bound of the headroom.
            limits.append((stat.get("hierarchical_memory_limit"), "memory.stat (hierarchical_memory_limit)"))
        elif read_int(group.folder / "memory.use_hierarchy") == 0:
            return []
        used = _unreclaimable(read_int(group.folder / "memory.usage_in_bytes"), stat, "total_", "total_")
    return [
        Bound(limit - used, str(group.folder / name))
        for limit, name in limits
        if limit is not None and limit < NO_LIMIT_BYTES
    ]


def _unreclaimable(usage: int | None, stat: dict[str, int], lru: str, state: str) -> int:
    """Usage less the file cache the kernel drops before it kills: on file lists and clean, in bytes.

    shmem and tmpfs pages are on the anonymous lists, so they stay counted as used.
    """

    def value(prefix: str, name: str) -> int:
        return stat.get(prefix + name, stat.get(name, 0))

    cache = value(lru, "inactive_file") + value(lru, "active_file")
    unclean = value(state, "dirty") + value(state, "writeback")
    return max(0, (usage or 0) - max(0, cache - unclean))
