"""Which device a job gets, and what it is told where there is none."""

from __future__ import annotations

import random
from typing import Any

import pytest
from tests.unit.plan.situations import GIB, make_hardware

from packmule.errors import ConfigError
from packmule.spec.hardware import Hardware, fake_device
from packmule.spec.job import Job
from packmule.train.devices import device_of


def job(**hardware: Any) -> Job:
    return Job.parse({"model": {"path": "m"}, "hardware": hardware}, "job.yaml")


@pytest.fixture
def machine(seed: int) -> Hardware:
    hardware = make_hardware(random.Random(seed))
    gpu = fake_device(hardware).model_copy(
        update={"name": "cuda:0", "memory_bytes": 8 * GIB, "free_bytes": 6 * GIB}
    )
    return hardware.model_copy(update={"devices": (gpu,)})


def test_the_cores_compute_unless_a_device_is_asked_for(machine: Hardware) -> None:
    assert device_of(job(), machine) is None
    assert device_of(job(device="auto"), machine.model_copy(update={"devices": ()})) is None


@pytest.mark.parametrize("name", ("auto", "cuda", "cuda:0"))
def test_a_gpu_is_found_and_most_of_what_is_free_is_used(machine: Hardware, name: str) -> None:
    chosen = device_of(job(device=name), machine)
    assert chosen is not None and chosen.speed.name == "cuda:0"
    assert 0.8 * 6 * GIB < chosen.memory_bytes < 6 * GIB


def test_the_fake_device_needs_none(machine: Hardware) -> None:
    chosen = device_of(job(device="fake", device_memory="1GB"), machine.model_copy(update={"devices": ()}))
    assert chosen is not None and chosen.speed.fake and chosen.memory_bytes == 10**9


@pytest.mark.parametrize(
    ("asked", "cause", "hint"),
    (
        ({"device": "cuda:1"}, "no such device (found: cuda:0)", "--device cpu"),
        ({"device": "cuda:0", "device_memory": "9GB"}, "more than `cuda:0` has", "use at most 6"),
        ({"device_memory": "1GB"}, "no device computes", "--device"),
        ({"device": "gpu"}, "give `cpu`, `auto`, `fake` or a GPU", "hardware.device"),
    ),
)
def test_what_is_not_there_is_refused_with_what_is(
    machine: Hardware, asked: dict[str, Any], cause: str, hint: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        device_of(job(**asked), machine)
    assert cause in caught.value.cause and hint in str(caught.value.hint)
