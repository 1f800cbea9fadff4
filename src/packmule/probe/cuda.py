"""Measures the GPUs that torch can use. Written from torch's documentation; it has never run on a GPU.

Only `torch_child` calls it: a process that has touched CUDA keeps its memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

_SIZES = (1024, 4096)
_COPY = 64 << 20
"""Bytes of the copies that are timed."""

_TASKS = 50


def cuda_devices(seconds: float) -> list[dict[str, Any]]:
    """`DeviceSpeed` records of every GPU, as plain data; empty where there is none.

    Args:
        seconds: about how long one timing may take.
    """
    import torch

    if not torch.cuda.is_available():
        return []
    return [_device(index, seconds) for index in range(torch.cuda.device_count())]


def _device(index: int, seconds: float) -> dict[str, Any]:
    import torch

    name = f"cuda:{index}"
    torch.cuda.set_device(index)
    untouched, _ = torch.cuda.mem_get_info(index)  # makes the context
    properties = torch.cuda.get_device_properties(index)
    small = torch.ones(8, device=name)

    def undisturbed(run: Callable[[], Any]) -> float:
        """Least seconds of a run that has ended on the device."""
        run()
        torch.cuda.synchronize(index)
        times: list[float] = []
        began = time.perf_counter()
        while len(times) < 3 or time.perf_counter() - began < seconds:
            start = time.perf_counter()
            run()
            torch.cuda.synchronize(index)
            times.append(time.perf_counter() - start)
            if len(times) == _TASKS:
                break
        return min(times)

    matmul: dict[str, list[dict[str, float]]] = {}
    for dtype in ("float32", "bfloat16", "float64"):
        matmul[dtype] = []
        for size in _SIZES:
            a = torch.ones(size, size, dtype=getattr(torch, dtype), device=name)
            took = undisturbed(lambda a=a: a @ a)  # type: ignore[misc]
            matmul[dtype].append({"size": size, "flops_per_second": 2.0 * size**3 / took})
    # The products have loaded what torch keeps there (cuBLAS and its workspace).
    torch.cuda.empty_cache()
    used = max(0, properties.total_memory - torch.cuda.mem_get_info(index)[0])
    there = torch.empty(_COPY, dtype=torch.uint8, device=name)
    other = torch.empty_like(there)
    host = torch.empty(_COPY, dtype=torch.uint8, pin_memory=True)
    return {
        "name": name,
        "model": properties.name,
        "memory_bytes": properties.total_memory,
        "free_bytes": untouched,
        "context_bytes": used,
        "matmul": matmul,
        "memory_bytes_per_second": 2 * _COPY / undisturbed(lambda: other.copy_(there)),
        "task_seconds": undisturbed(lambda: torch.add(small, small)),
        "send_bytes_per_second": _COPY / undisturbed(lambda: there.copy_(host, non_blocking=True)),
        "receive_bytes_per_second": _COPY / undisturbed(lambda: host.copy_(there, non_blocking=True)),
    }
