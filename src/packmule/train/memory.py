"""A process's own memory: what it uses, how malloc behaves, what it may not exceed. No torch."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import resource
from dataclasses import dataclass
from pathlib import Path

from packmule.errors import OutOfMemory
from packmule.shapes.bodies import code_bytes, dtypes
from packmule.spec.plan import Numerics

_M_TRIM_THRESHOLD = -1
_M_MMAP_MAX = -4
_M_ARENA_MAX = -8
_LARGEST = 2**31 - 1
_GAPS = 12 << 20


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


def memory_now() -> dict[str, int]:
    """This process's memory as the fields of an event."""
    memory = process_memory()
    return {"resident_bytes": memory.resident, "peak_bytes": memory.peak}


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
    # One heap for all threads, so that what one frees another can use.
    mallopt(_M_ARENA_MAX, 1)
    return bool(mallopt(_M_MMAP_MAX, 0) and mallopt(_M_TRIM_THRESHOLD, _LARGEST))


_MALLINFO2 = (
    *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
    *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
)


class _Mallinfo2(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_size_t) for name in _MALLINFO2)


def heap_bytes() -> int:
    """Bytes that malloc has handed out on its heap; 0 where the C library does not say."""
    try:
        mallinfo2 = ctypes.CDLL(None).mallinfo2
    except (AttributeError, OSError):
        return 0
    mallinfo2.restype = _Mallinfo2
    return int(mallinfo2().uordblks)


def trim_malloc() -> None:
    """Give the free memory that malloc keeps back to the system."""
    gc.collect()
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


def tune_caches(primitives: int) -> None:
    """Have oneDNN, and torch's layer over it, keep at most `primitives` compiled matrix products
    each (M: 0.6 MB apiece, one per shape; 1024 by default, which a run with documents of many
    lengths fills). Both read the C environment, once: call before torch is imported.
    """
    try:
        setenv = ctypes.CDLL(None).setenv
    except (AttributeError, OSError):
        return
    for name in (b"LRU_CACHE_CAPACITY", b"ONEDNN_PRIMITIVE_CACHE_CAPACITY"):
        setenv(name, b"%d" % primitives, 1)


def untouched_bytes(threads: int, code: int = 0) -> int:
    """What a child still maps and hardly touches: stacks of threads to come, gaps in the heap
    (M: 26 MB with two threads), compiled code. A library that is refused such memory may well crash.

    Args:
        code: bytes that it maps in the end for code that it compiles (`shapes.bodies.code_bytes`).
    """
    stack, _ = resource.getrlimit(resource.RLIMIT_STACK)
    gaps = _GAPS + threads * (stack if stack != resource.RLIM_INFINITY else 2 << 20)
    return gaps + max(0, code - mapped_code_bytes())


def mapped_code_bytes() -> int:
    """What this process has mapped so far for code that it compiled."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return 0
    ranges = [line.split()[0].split("-") for line in lines if " rwx" in line]
    return sum(int(end, 16) - int(start, 16) for start, end in ranges)


def keep_budget(allowed: int, numerics: Numerics) -> None:
    """`limit_data` for a process that trains or evaluates. To be renewed now and then: what it has mapped
    since then need not be allowed for any more."""
    limit_data(allowed, untouched_bytes(numerics.threads, code_bytes(dtypes(numerics))))


def limit_data(allowed: int, untouched: int = 0) -> bool:
    """Make malloc fail once this process would exceed `allowed` resident bytes.

    RLIMIT_DATA counts address space, so what is mapped but not resident now stays allowed.

    Args:
        untouched: bytes that it may map besides, since it will not touch them.

    Returns:
        Whether a limit was set (where /proc exists).
    """
    now = process_memory()
    if not now.data:
        return False
    limit = now.data + max(0, allowed - now.resident) + untouched
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if hard != resource.RLIM_INFINITY:
        limit = min(limit, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
    return True


def unlimit_data() -> None:
    """Take `limit_data` back, so that a process that hit its limit can still say so."""
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error is an allocation that malloc or torch could not make."""
    return isinstance(error, MemoryError) or says_out_of_memory(str(error))


def out_of_memory(error: BaseException) -> OutOfMemory:
    """What such an error tells a user."""
    first = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return OutOfMemory(
        f"An allocation failed at the budget: {first} (this process held {process_memory().peak:,} bytes).",
        "the last commit is kept; run the same command with a slightly larger --ram",
    )


def says_out_of_memory(text: str) -> bool:
    """Whether the words of an error, or of a process that died of one, are those of an allocation
    that malloc, torch or C++ could not make."""
    # oneDNN's; of a primitive that it has not for some shape it says that its descriptor was not created.
    compiling = "could not create a primitive" in text and "primitive descriptor" not in text
    return compiling or any(
        sign in text for sign in ("allocate memory", "bad_alloc", "can't start new thread")
    )


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
