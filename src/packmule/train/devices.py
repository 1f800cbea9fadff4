"""Which device a job's run computes on, and how much of its memory it may hold. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from packmule.errors import ConfigError
from packmule.spec.hardware import DeviceSpeed, Hardware, fake_device
from packmule.spec.job import Job
from packmule.spec.units import format_bytes

FREE_SHARE = 0.9
"""Of a device's free memory, where a job does not say how much it may use."""


@dataclass(frozen=True)
class Chosen:
    """A device and the bytes of its memory that a run may hold, what torch takes included."""

    speed: DeviceSpeed
    memory_bytes: int


def device_of(job: Job, hardware: Hardware) -> Chosen | None:
    """What `hardware.device` asks for; None: the cores compute.

    Raises:
        ConfigError: there is no such device, or it has less memory than is asked for.
    """
    wanted, asked = job.hardware.device, job.hardware.device_memory
    if wanted == "auto":
        wanted = hardware.devices[0].name if hardware.devices and job.model.factory is None else "cpu"
    if wanted == "cpu":
        if asked != "auto":
            raise ConfigError(
                f"`hardware.device_memory` = {format_bytes(int(asked))}, and no device computes.",
                "choose one with --device, or leave --device-memory out",
            )
        return None
    if job.model.factory is not None:
        raise ConfigError(
            f"`hardware.device` = {wanted!r} is not offered for modules of one's own.",
            "leave it `cpu`: they are measured on this machine's cores",
        )
    known = {device.name: device for device in (*hardware.devices, fake_device(hardware))}
    if wanted not in known:
        there = ", ".join(device.name for device in hardware.devices) or "none"
        raise ConfigError(
            f"`hardware.device` = {wanted!r}: the probe found no such device (found: {there}).",
            "`packmule probe --fresh` looks again; --device cpu computes on this machine's cores",
        )
    speed = known[wanted]
    if asked == "auto":
        return Chosen(speed, int(speed.free_bytes * FREE_SHARE))
    if int(asked) > speed.memory_bytes:
        raise ConfigError(
            f"`hardware.device_memory` = {format_bytes(int(asked))} is more than `{wanted}` has "
            f"({format_bytes(speed.memory_bytes)}, of which {format_bytes(speed.free_bytes)} were free).",
            f"use at most {format_bytes(speed.free_bytes)}",
        )
    return Chosen(speed, int(asked))
