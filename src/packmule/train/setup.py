"""Making a child's engine from a run folder: kernels, store or reader, plan. Shared by all work."""

from __future__ import annotations

from typing import Any

import torch

from packmule.checkpoint.layout import StateLayout
from packmule.checkpoint.store import StateStore
from packmule.graph.costs import Costs
from packmule.kernels import load
from packmule.kernels.contract import Kernels
from packmule.shapes.bodies import DTYPES, dtypes
from packmule.shapes.module import Shape
from packmule.shapes.state import STATES
from packmule.spec.hardware import Hardware, device_named
from packmule.spec.plan import Plan
from packmule.tiers.device import Device, FakeDevice
from packmule.tiers.disk import Disk
from packmule.train.folder import RunFolder


def make_kernels(plan: Plan) -> Kernels:
    """The kernels and torch threads that a plan's numerics name."""
    torch.set_num_threads(plan.numerics.threads)
    isa = None if plan.numerics.kernels == "native" else "torch"
    return load(plan.numerics.threads, isa, share=True)


def make_store(disk: Disk, folder: RunFolder, shape: Shape, plan: Plan, kernels: Kernels) -> StateStore:
    """The run's store, neither created nor loaded."""
    dtype: Any = DTYPES[plan.numerics.precision].master
    planes = STATES[plan.numerics.optimizer.rule].planes
    layout = StateLayout.of(shape.blocks(), planes, dtype, plan.io.chunk_bytes)
    return StateStore(disk, folder.state, layout, kernels.crc32c)


def costs_of(hardware: Hardware, plan: Plan) -> Costs:
    """The rates that a plan's predictions use."""
    found = None if plan.device is None else device_named(hardware, plan.device.name)
    return Costs.of(hardware, dtypes(plan.numerics).product, hardware.disks[0], found)


def make_device(hardware: Hardware, plan: Plan) -> Device | None:
    """What a plan computes on beside the cores."""
    if plan.device is None:
        return None
    speed = device_named(hardware, plan.device.name)
    if speed.fake:
        return FakeDevice(speed.send_bytes_per_second, speed.receive_bytes_per_second)
    from packmule.engine.cuda import CudaDevice

    return CudaDevice(speed.name)
