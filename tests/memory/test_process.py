"""A process's view of its own memory, and the limit it sets itself."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import textwrap

import pytest

from packmule.train.memory import ProcessMemory, process_memory, says_out_of_memory

MIB = 1 << 20


def run(body: str) -> str:
    """Standard output of a fresh process that runs the body."""
    script = "from packmule.train.memory import *\n" + textwrap.dedent(body)
    environment = {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_sizes_are_those_of_the_kernel() -> None:
    memory = process_memory(os.getpid())
    assert abs(memory.peak - process_memory().peak) < MIB
    # ru_maxrss is the same figure in KiB; this process may have grown between the two.
    assert abs(memory.peak - 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss) < 4 * MIB
    assert 0 < memory.resident <= memory.peak
    assert memory.data > 0


def test_a_process_that_has_ended_has_no_memory() -> None:
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    child.wait()
    assert process_memory(child.pid) == ProcessMemory()


def test_an_allocation_is_seen() -> None:
    before, after = run(
        """
        before = process_memory()
        block = bytearray(64 << 20)
        print(before.resident, process_memory().resident)
        """
    ).split()
    assert 60 * MIB < int(after) - int(before) < 70 * MIB


def test_an_overrun_is_an_error_that_the_process_survives() -> None:
    refused, fits, freed, peak, limit = run(
        """
        tune_malloc()
        limit = process_memory().resident + (100 << 20)
        assert limit_data(limit)
        try:
            block = bytearray(150 << 20)
            refused = False
        except MemoryError:
            refused = True
        fits = len(bytearray(60 << 20)) == 60 << 20
        unlimit_data()
        freed = len(bytearray(150 << 20)) == 150 << 20
        print(refused, fits, freed, process_memory().peak, limit)
        """
    ).split()
    assert (refused, fits, freed) == ("True", "True", "True")
    assert int(peak) > int(limit)  # only after the limit was taken back


def test_touched_memory_stays_below_the_limit() -> None:
    """The limit counts address space, so it must leave room for what was mapped and not touched."""
    peak, limit = run(
        """
        import mmap
        mapped = mmap.mmap(-1, 300 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        limit = process_memory().resident + (80 << 20)
        limit_data(limit)
        blocks = []
        try:
            while True:
                blocks.append(bytearray(b"x" * (1 << 20)))
        except MemoryError:
            pass
        print(process_memory().peak, limit)
        """
    ).split()
    assert int(limit) - 20 * MIB < int(peak) <= int(limit) + MIB


def test_code_to_come_is_allowed_for_and_code_that_is_there_is_not_twice() -> None:
    before, after = run(
        """
        import mmap
        READ_WRITE_EXECUTE = mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC

        def left():
            return resource.getrlimit(resource.RLIMIT_DATA)[0] - process_memory().data

        def limit():
            assert limit_data(process_memory().resident, untouched_bytes(1, 80 << 20) - untouched_bytes(1))

        limit()
        before = left()
        code = mmap.mmap(-1, 50 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=READ_WRITE_EXECUTE)
        limit()
        print(before, left())
        """
    ).split()
    assert abs(int(before) - 80 * MIB) < MIB
    assert abs(int(after) - 30 * MIB) < MIB


def test_what_libraries_say_of_a_failed_allocation_is_known() -> None:
    """oneDNN's words are those of a refused mapping, unless it has no such primitive at all."""
    assert says_out_of_memory("RuntimeError: could not create a primitive")
    assert says_out_of_memory("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried")
    assert not says_out_of_memory("could not create a primitive descriptor for the matmul primitive")


@pytest.mark.parametrize("kept", (4, 40))
def test_cache_limits_reach_the_c_environment(kept: int) -> None:
    found = run(
        f"""
        import ctypes
        tune_caches({kept})
        getenv = ctypes.CDLL(None).getenv
        getenv.restype = ctypes.c_char_p
        print(getenv(b"LRU_CACHE_CAPACITY").decode(), getenv(b"ONEDNN_PRIMITIVE_CACHE_CAPACITY").decode())
        """
    )
    assert found.split() == [str(kept)] * 2


def test_trimming_gives_freed_memory_back() -> None:
    kept, given = run(
        """
        tune_malloc()
        before = process_memory().resident
        blocks = [bytearray(b"x" * (1 << 20)) for _ in range(50)]
        assert heap_bytes() > 50 << 20
        del blocks
        kept = process_memory().resident - before
        trim_malloc()
        print(kept, process_memory().resident - before)
        """
    ).split()
    assert int(kept) > 40 * MIB
    assert int(given) < 5 * MIB
