"""A process's own memory: what it uses, how malloc behaves, what it may not exceed. No torch."""

from __future__ import annotations

import ctypes
import os
import resource
from dataclasses import dataclass
from pathlib import Path

_M_TRIM_THRESHOLD = -1
_M_MMAP_MAX = -4
_LARGEST = 2**31 - 1


@dataclass(frozen=True)
class ProcessMemory:
    """Bytes, as /proc/PID/status gives them; zeros where there is no such file."""

    resident: int = 0
    peak: int = 0
    data: int = 0


def process_memory(pid: int | str = "self") -> ProcessMemory:
    """VmRSS, VmHWM and VmData of a process."""
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return ProcessMemory()
    fields = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)

    def size(name: str) -> int:
        words = fields.get(name, "0").split()
        return int(words[0]) * 1024 if words else 0

    return ProcessMemory(size("VmRSS"), size("VmHWM"), size("VmData"))


def tune_malloc() -> bool:
    """Have glibc keep freed memory instead of giving it back and faulting it in again (M: a
    40 MiB temporary per step costs 2.5 times as much without). Call before torch is imported.

    Returns:
        Whether this C library has the knobs.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    return bool(mallopt(_M_MMAP_MAX, 0) and mallopt(_M_TRIM_THRESHOLD, _LARGEST))


def limit_data(allowed: int) -> bool:
    """Make malloc fail once this process would exceed `allowed` resident bytes.

    RLIMIT_DATA counts address space, so what is mapped but not resident now stays allowed.

    Returns:
        Whether a limit was set (where /proc exists).
    """
    now = process_memory()
    if not now.data:
        return False
    limit = now.data + max(0, allowed - now.resident)
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if hard != resource.RLIM_INFINITY:
        limit = min(limit, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
    return True


def unlimit_data() -> None:
    """Take `limit_data` back, so that a process that hit its limit can still say so."""
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))


def die_with_parent(parent: int) -> None:
    """Get SIGTERM when the parent process ends (Linux; elsewhere nothing happens).

    Args:
        parent: its process id; if it has ended already, this process ends here.
    """
    try:
        ctypes.CDLL(None).prctl(1, 15, 0, 0, 0)  # PR_SET_PDEATHSIG, SIGTERM
    except (AttributeError, OSError):
        return
    # It may have ended before the call, and then no signal comes.
    if os.getppid() != parent:
        os._exit(1)
