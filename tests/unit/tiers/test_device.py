"""The fake device keeps bytes of its own, copies them and counts them, no faster than it is told."""

from __future__ import annotations

import random
import time

import pytest

from packmule.errors import RunFailed
from packmule.shapes.layout import PAGE
from packmule.tiers.device import FakeDevice

SIZE = 3 * PAGE + 5


def test_what_is_sent_comes_back_and_is_counted(seed: int) -> None:
    device, rng = FakeDevice(), random.Random(seed)
    device.allocate(SIZE)
    begin = rng.randrange(SIZE)
    data = rng.randbytes(rng.randrange(SIZE - begin) + 1)
    device.send(memoryview(data), begin)
    found = bytearray(len(data))
    device.receive(memoryview(found), begin)
    device.receive(memoryview(found), begin)
    assert bytes(found) == data
    assert (device.sent, device.received) == (len(data), 2 * len(data))


def test_it_holds_whole_pages_that_are_not_the_senders(seed: int) -> None:
    device, rng = FakeDevice(), random.Random(seed)
    memory = device.allocate(SIZE)
    data = bytearray(rng.randbytes(PAGE))
    before = bytes(data)
    device.send(memoryview(data), PAGE)
    data[:] = bytes(PAGE)
    assert bytes(memory.numpy()[PAGE : 2 * PAGE]) == before
    assert len(memory) == 4 * PAGE


@pytest.mark.parametrize("send", (True, False))
def test_a_transfer_takes_at_least_its_bytes_over_the_rate(send: bool) -> None:
    """Never a question of the machine's speed: a slow one takes longer still."""
    seconds, bytes_moved = 0.05, 2 * PAGE
    rate = bytes_moved / seconds
    device = FakeDevice(rate, float("inf")) if send else FakeDevice(float("inf"), rate)
    device.allocate(bytes_moved)
    buffer, began = memoryview(bytearray(bytes_moved)), time.perf_counter()
    device.send(buffer, 0) if send else device.receive(buffer, 0)
    assert time.perf_counter() - began >= seconds


def test_a_computation_takes_at_least_what_it_is_told() -> None:
    device, began = FakeDevice(compute_seconds=0.02), time.perf_counter()
    with device.computing():
        pass
    assert time.perf_counter() - began >= 0.02


def test_a_gpu_that_is_not_there_is_an_error_that_says_so() -> None:
    import torch

    from packmule.engine.cuda import CudaDevice

    with pytest.raises(RunFailed, match=r"There is no GPU `cuda:\d+`") as caught:
        CudaDevice(f"cuda:{torch.cuda.device_count()}")
    assert "--device cpu" in str(caught.value.hint)
