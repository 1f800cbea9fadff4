"""CudaDevice: a CUDA GPU as the device. Written from torch's documentation; it has never run on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from packmule.errors import DoesNotFit, RunFailed
from packmule.kernels.contract import Kernels
from packmule.kernels.reference import TorchKernels
from packmule.spec.units import format_bytes


class CudaDevice:
    """One GPU. Three streams are the lanes of the graph's resources: computation and the link's two
    directions; each call waits for its own stream alone, so that the others run on beside it.

    The arena in RAM is page-locked as a whole and at its exact size: it is resident anyway, so this takes no
    memory, where torch's own pinned allocations would be rounded up to powers of two.

    Args:
        name: as torch has it, "cuda:0".

    Raises:
        RunFailed: torch finds no such GPU.
    """

    def __init__(self, name: str) -> None:
        if not torch.cuda.is_available() or torch.device(name).index >= torch.cuda.device_count():
            raise RunFailed(
                f"There is no GPU `{name}` that torch can use.",
                "--device cpu computes on this machine's cores; or look at the driver with nvidia-smi",
            )
        self.torch_name = name
        torch.cuda.set_device(name)
        # Same numerics, same bits: sums over tokens of one id would otherwise be added in any order.
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        self._compute, self._send, self._receive = (torch.cuda.Stream(name) for _ in range(3))
        self._arena = torch.empty(0, dtype=torch.uint8, device=name)
        self._pinned: Tensor | None = None

    def allocate(self, size: int) -> Tensor:
        try:
            self._arena = torch.empty(max(1, size), dtype=torch.uint8, device=self.torch_name)
        except torch.cuda.OutOfMemoryError:
            free, _ = torch.cuda.mem_get_info(self.torch_name)
            raise DoesNotFit(
                f"The plan needs {format_bytes(size)} of `{self.torch_name}`, which has {format_bytes(free)} "
                "free.",
                f"--device-memory {format_bytes(0.9 * free).replace(' ', '')}, or end what else runs there",
            ) from None
        torch.cuda.synchronize(self.torch_name)
        return self._arena

    def pin(self, memory: memoryview) -> None:
        host = torch.frombuffer(memory, dtype=torch.uint8)
        status = torch.cuda.cudart().cudaHostRegister(host.data_ptr(), host.numel(), 0)
        if int(status) != 0:
            raise RunFailed(
                f"{format_bytes(len(memory))} of RAM cannot be page-locked for `{self.torch_name}` "
                f"(CUDA error {int(status)}).",
                "a smaller --ram needs less; some systems lock no more than half of their memory",
            )
        self._pinned = host

    def send(self, source: memoryview, offset: int) -> None:
        host = torch.frombuffer(source, dtype=torch.uint8)
        self._copy(self._arena[offset : offset + len(source)], host, self._send)

    def receive(self, target: memoryview, offset: int) -> None:
        host = torch.frombuffer(target, dtype=torch.uint8)
        self._copy(host, self._arena[offset : offset + len(target)], self._receive)

    def _copy(self, target: Tensor, source: Tensor, stream: torch.cuda.Stream) -> None:
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
        stream.synchronize()

    @contextmanager
    def computing(self) -> Iterator[None]:
        with torch.cuda.stream(self._compute):
            yield
        self._compute.synchronize()

    def kernels(self, cores: Kernels) -> Kernels:
        return TorchKernels(cores.threads)

    def close(self) -> None:
        torch.cuda.synchronize(self.torch_name)
        if self._pinned is not None:
            torch.cuda.cudart().cudaHostUnregister(self._pinned.data_ptr())
            self._pinned = None
        self._arena = torch.empty(0, dtype=torch.uint8, device=self.torch_name)
