"""What a machine can do, as measured by the probe or written by hand."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from packmule.spec.records import Record


class MatmulPoint(Record):
    """Measured matrix-multiply speed at one size: (size x size) @ (size x size)."""

    size: int = Field(ge=1)
    flops_per_second: float = Field(gt=0)


MIX_BYTES = 4 << 20
"""Read, then written, then read, ... where a disk's mix is measured."""


class DiskSpeed(Record):
    """One path's disk, in bytes per second, with O_DIRECT where it works."""

    path: str
    direct: bool
    read_bytes_per_second: float = Field(gt=0)
    write_bytes_per_second: float = Field(gt=0)
    mix_bytes_per_second: float = Field(gt=0, description="reads and writes 1:1, both counted")
    sync_seconds: float = Field(ge=0, description="one 4 KiB write and fdatasync")
    free_bytes: int = Field(ge=0)
    total_bytes: int = Field(default=0, ge=0, description="size of its file system; 0: not known")
    device: str = Field(default="", description="source and type of the mount, as mountinfo gives them")
    filesystem: str = Field(default="", description="its type; files on tmpfs and ramfs are RAM")

    @property
    def turnaround_seconds(self) -> float:
        """What it costs to turn from reading to writing or back: little on a flash disk, a seek on one
        that spins. The mix takes that much longer than its reads and its writes alone."""
        alone = 1 / self.read_bytes_per_second + 1 / self.write_bytes_per_second
        return max(0.0, MIX_BYTES * (2 / self.mix_bytes_per_second - alone) / 2)


class DeviceSpeed(Record):
    """One device that computes beside the cores, and its link to RAM."""

    name: str = Field(description='as a job names it: "cuda:0", or "fake"')
    model: str = Field(description="as its driver names it; the bits of what it computes are its own")
    memory_bytes: int = Field(ge=0)
    free_bytes: int = Field(ge=0)
    context_bytes: int = Field(default=0, ge=0, description="of its memory, what torch takes before any work")
    matmul: dict[str, tuple[MatmulPoint, ...]] = Field(description="by dtype, as the machine's")
    memory_bytes_per_second: float = Field(gt=0, description="copy, read + written bytes")
    task_seconds: float = Field(ge=0, description="start of one computation, and waiting for its end")
    send_bytes_per_second: float = Field(gt=0, description="from page-locked RAM")
    receive_bytes_per_second: float = Field(gt=0)

    @property
    def fake(self) -> bool:
        """Made of this machine's own memory and cores."""
        return self.name == FAKE

    def matmul_rate(self, dtype: str) -> float:
        """FLOP/s of the largest matmul measured."""
        return max(self.matmul[dtype], key=lambda point: point.size).flops_per_second


FAKE = "fake"
"""The device that needs none."""

FAKE_LINK = 4e9
"""Bytes per second of its link, in each direction: about half a PCIe 3.0 x8."""


class Hardware(Record):
    """One machine. Bytes and seconds throughout; rates are per second with all threads."""

    format: int = 1
    date: str
    host: str
    cpu: str = Field(description="model name as /proc/cpuinfo gives it")
    cpu_features: tuple[str, ...] = Field(description="of avx2, fma, avx512f, avx512_bf16, amx_bf16")
    threads: int = Field(ge=1, description="cores usable under affinity and the cgroup quota")
    ram_total_bytes: int = Field(ge=0)
    ram_available_bytes: int = Field(ge=0, description="least of cgroup headroom and MemAvailable")
    ram_limit_source: str = Field(description="what set ram_available_bytes: a path")
    matmul: dict[str, tuple[MatmulPoint, ...]] = Field(description="by dtype: float32, bfloat16, float64")
    memory_bytes_per_second: float = Field(gt=0, description="copy, read + written bytes, all threads")
    task_seconds: float = Field(ge=0, description="overhead of one task")
    disks: tuple[DiskSpeed, ...]
    devices: tuple[DeviceSpeed, ...] = Field(default=(), description="GPUs that torch can use")
    parent_baseline_bytes: int = Field(ge=0, description="VmHWM of a torch-free packmule parent")
    child_baseline_bytes: int = Field(
        ge=0, description="resident bytes of a training child after a tiny layer has run"
    )
    software: str = Field(default="", description="versions of python, torch and packmule that were measured")
    busy_fraction: float = Field(
        default=0.0, description="part of the threads that other programs kept from running meanwhile"
    )

    def matmul_rate(self, dtype: str) -> float:
        """FLOP/s of the largest matmul measured."""
        return max(self.matmul[dtype], key=lambda point: point.size).flops_per_second

    def wider_product(self, precision: str) -> Literal["float32"] | None:
        """The dtype to multiply in if it is not the precision's: float32 where that is faster than
        bfloat16, as on CPUs that run AVX-512's bfloat16 instructions at half the rate."""
        slow = self.matmul_rate("bfloat16") < self.matmul_rate("float32")
        return "float32" if precision == "bf16-mixed" and slow else None


def fake_device(hardware: Hardware) -> DeviceSpeed:
    """The device that is made of a machine's own RAM and cores: to look at plans, and to run their graphs,
    without a GPU. Its memory counts in the budget of RAM."""
    return DeviceSpeed(
        name=FAKE,
        model="ordinary memory behind a link of a stated rate",
        memory_bytes=hardware.ram_total_bytes,
        free_bytes=hardware.ram_available_bytes // 2,
        matmul=hardware.matmul,
        memory_bytes_per_second=hardware.memory_bytes_per_second,
        task_seconds=hardware.task_seconds,
        send_bytes_per_second=FAKE_LINK,
        receive_bytes_per_second=FAKE_LINK,
    )


def device_named(hardware: Hardware, name: str) -> DeviceSpeed:
    """One of a machine's devices, or the fake one.

    Raises:
        ValueError: it has no such device.
    """
    for device in (*hardware.devices, fake_device(hardware)):
        if device.name == name:
            return device
    raise ValueError(f"this machine has no device {name!r}")
