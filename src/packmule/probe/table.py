"""`explain`: a Hardware record as rows of text. No measuring, no drawing."""

from __future__ import annotations

from packmule.spec.hardware import DeviceSpeed, DiskSpeed, Hardware, MatmulPoint
from packmule.spec.units import format_bytes, format_rate, format_seconds

_WORTH_TELLING = 0.1


def explain(hardware: Hardware) -> list[tuple[str, str]]:
    """(label, value) rows for a table, most general first."""
    rows = [
        ("machine", f"{hardware.host}, measured {hardware.date}"),
        ("CPU", hardware.cpu),
        ("CPU features", ", ".join(hardware.cpu_features) or "none of those that matter"),
        ("threads", str(hardware.threads)),
        ("RAM", _ram(hardware)),
    ]
    rows += [(f"matmul {dtype}", _matmul(points)) for dtype, points in hardware.matmul.items()]
    rows += [
        ("memory copy", f"{format_rate(hardware.memory_bytes_per_second)}, read + written"),
        ("task overhead", format_seconds(hardware.task_seconds)),
    ]
    for disk in hardware.disks:
        rows += _disk(disk)
    for device in hardware.devices:
        rows += _device(device)
    rows += [
        ("parent process", f"{format_bytes(hardware.parent_baseline_bytes)} before any work"),
        ("training process", f"{format_bytes(hardware.child_baseline_bytes)} before any work"),
    ]
    if hardware.software:
        rows.append(("software", hardware.software))
    if hardware.busy_fraction > _WORTH_TELLING:
        share = f"other programs took {hardware.busy_fraction:.0%} of the threads meanwhile"
        rows.append(("note", f"{share}; measure again when they are done"))
    return rows


def _ram(hardware: Hardware) -> str:
    available, total = (format_bytes(n) for n in (hardware.ram_available_bytes, hardware.ram_total_bytes))
    return f"{available} available of {total}, as {hardware.ram_limit_source} says"


def _matmul(points: tuple[MatmulPoint, ...]) -> str:
    speeds = [f"{format_rate(point.flops_per_second, 'FLOP')} at {point.size}" for point in points]
    return ", ".join(speeds) or "not measured"


def _disk(disk: DiskSpeed) -> list[tuple[str, str]]:
    where = f"{disk.path} ({disk.device})" if disk.device else disk.path
    notes = [] if disk.direct else ["no O_DIRECT"]
    if disk.filesystem in ("tmpfs", "ramfs"):
        notes.append("files here are RAM")
    rates = (disk.read_bytes_per_second, disk.write_bytes_per_second, disk.mix_bytes_per_second)
    read, write, mix = map(format_rate, rates)
    return [
        ("disk", ", ".join([where, f"{format_bytes(disk.free_bytes)} free", *notes])),
        ("disk speed", f"read {read}, write {write}, both 1:1 {mix}"),
        ("small durable write", format_seconds(disk.sync_seconds)),
    ]


def _device(device: DeviceSpeed) -> list[tuple[str, str]]:
    free, total = format_bytes(device.free_bytes), format_bytes(device.memory_bytes)
    rates = map(format_rate, (device.send_bytes_per_second, device.receive_bytes_per_second))
    return [
        (f"device {device.name}", f"{device.model}, {free} of {total} free"),
        *((f"matmul {dtype}", _matmul(points)) for dtype, points in device.matmul.items()),
        ("link", "{} there, {} back".format(*rates)),
    ]
