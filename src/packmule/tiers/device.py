"""Device: memory of its own behind a link, and what computes there. Two kinds: one of ordinary memory,
for tests and for a look at a plan (`FakeDevice`), and CUDA's (`packmule.engine.cuda`).

A transfer or a computation has ended when its call returns: what the executor calls the end of a task.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Protocol

from packmule.shapes.layout import PAGE, round_up

if TYPE_CHECKING:
    from torch import Tensor

    from packmule.kernels.contract import Kernels


class Device(Protocol):
    """What a device does for the engine. `send`, `receive` and `computing` have one calling thread each."""

    @property
    def torch_name(self) -> str:
        """What torch calls the place of its tensors: "cpu", "cuda:0"."""

    def allocate(self, size: int) -> Tensor:
        """Its arena: uint8 [size], the one allocation that holds every buffer on it.

        Raises:
            DoesNotFit: there is less memory.
        """

    def pin(self, memory: memoryview) -> None:
        """What is sent or received lies in these bytes of RAM from now on."""

    def send(self, source: memoryview, offset: int) -> None:
        """Copy bytes of RAM to an offset of the arena."""

    def receive(self, target: memoryview, offset: int) -> None:
        """Copy bytes from an offset of the arena to RAM."""

    def computing(self) -> AbstractContextManager[None]:
        """What is computed inside is computed on the device, and done at the end."""

    def kernels(self, cores: Kernels) -> Kernels:
        """Those that work on its tensors.

        Args:
            cores: the machine's own.
        """

    def close(self) -> None:
        """Let go of its memory."""


class FakeDevice:
    """A device made of ordinary memory, whose link is as slow as asked: the graphs, the copies and the order
    of a device on a machine that has none. Its bits are those of the machine's cores.

    Args:
        send_bytes, receive_bytes: most bytes per second of the link's two directions.
        compute_seconds: least seconds that a computation takes.

    Attributes:
        sent, received: bytes so far.
    """

    torch_name = "cpu"

    def __init__(
        self,
        send_bytes: float = float("inf"),
        receive_bytes: float = float("inf"),
        compute_seconds: float = 0.0,
    ) -> None:
        self._rates = (send_bytes, receive_bytes)
        self._compute_seconds = compute_seconds
        self._memory = memoryview(b"")
        self.sent = self.received = 0

    def allocate(self, size: int) -> Tensor:
        import torch

        total = max(PAGE, round_up(size, PAGE))
        mapped = mmap.mmap(-1, total, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._memory = memoryview(mapped)
        return torch.frombuffer(self._memory, dtype=torch.uint8)

    def pin(self, memory: memoryview) -> None:
        """Nothing to do: ordinary memory is copied as it is."""

    def send(self, source: memoryview, offset: int) -> None:
        self._copy(self._memory[offset : offset + len(source)], source, self._rates[0])
        self.sent += len(source)

    def receive(self, target: memoryview, offset: int) -> None:
        self._copy(target, self._memory[offset : offset + len(target)], self._rates[1])
        self.received += len(target)

    def _copy(self, target: memoryview, source: memoryview, rate: float) -> None:
        import numpy as np

        began = time.perf_counter()
        np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))  # without the GIL
        _wait_until(began + len(source) / rate)

    @contextmanager
    def computing(self) -> Iterator[None]:
        began = time.perf_counter()
        yield
        _wait_until(began + self._compute_seconds)

    def kernels(self, cores: Kernels) -> Kernels:
        return cores

    def close(self) -> None:
        """Its memory goes when the last tensor that looks at it does."""


def _wait_until(moment: float) -> None:
    left = moment - time.perf_counter()
    if left > 0:
        time.sleep(left)
