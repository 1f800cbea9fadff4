"""Predicted seconds of each kind of work: a roofline over one machine's measured rates."""

from __future__ import annotations

from dataclasses import dataclass, replace

from packmule.spec.hardware import DeviceSpeed, DiskSpeed, Hardware

ATTENTION_SHARE = 0.4
"""Attention's speed as a share of a large matmul's: its products are small and its softmax
is bound by memory."""

TORCH_PASSES = 3.5
"""What an update in torch's operations moves through memory, as a multiple of what it has to: AdamW's read or
write some 25 values per element where one pass has 7.5 (counted, not measured)."""

TORCH_COPIES = 4
"""Chunks of a plane that these operations hold at once: scaled gradient, root, quotient, and one to spare."""


@dataclass(frozen=True)
class DeviceCosts:
    """Rates of a device that computes.

    Attributes:
        compute: its own, where a machine's are asked for; it has no disk.
        send_bytes, receive_bytes: per second, of the link's two directions.
        torch_kernels: its updates are torch's operations one by one, and not one pass of csrc.
    """

    compute: Costs
    send_bytes: float
    receive_bytes: float
    torch_kernels: bool = False

    def update(self, moved: float) -> float:
        """Seconds of an update that moves so many bytes at least through the device's memory."""
        return self.compute.compute(moved=moved * (TORCH_PASSES if self.torch_kernels else 1.0))

    def update_workspace(self, size: int) -> int:
        """Bytes that an update of a chunk of a plane allocates on the device and frees again."""
        return TORCH_COPIES * size if self.torch_kernels else 0

    def send(self, size: int) -> float:
        """Seconds to bring bytes from RAM to the device."""
        return size / self.send_bytes + self.compute.task_seconds

    def receive(self, size: int) -> float:
        """Seconds to bring bytes from the device to RAM."""
        return size / self.receive_bytes + self.compute.task_seconds


@dataclass(frozen=True)
class Costs:
    """Rates per second with all threads, and the overhead of one task in seconds.

    Attributes:
        device: what computes instead of the cores where a plan says so; None: there is none.
    """

    matmul_flops: float
    attention_flops: float
    memory_bytes: float
    read_bytes: float
    write_bytes: float
    turnaround_seconds: float
    sync_seconds: float
    task_seconds: float
    device: DeviceCosts | None = None

    @classmethod
    def of(
        cls, hardware: Hardware, product: str, disk: DiskSpeed, device: DeviceSpeed | None = None
    ) -> Costs:
        """Rates for one dtype of products.

        Args:
            device: what computes instead of the cores.
        """
        if device is not None:
            return replace(
                cls.of(hardware, product, disk), device=_device_costs(hardware, product, disk, device)
            )
        matmul = hardware.matmul_rate(product)
        return cls(
            matmul_flops=matmul,
            attention_flops=matmul * ATTENTION_SHARE,
            memory_bytes=hardware.memory_bytes_per_second,
            read_bytes=disk.read_bytes_per_second,
            write_bytes=disk.write_bytes_per_second,
            turnaround_seconds=disk.turnaround_seconds,
            sync_seconds=disk.sync_seconds,
            task_seconds=hardware.task_seconds,
        )

    def compute(self, matmul: float = 0.0, attention: float = 0.0, moved: float = 0.0) -> float:
        """Seconds for some matmul and attention FLOPs and bytes moved through memory."""
        return (
            matmul / self.matmul_flops
            + attention / self.attention_flops
            + moved / self.memory_bytes
            + self.task_seconds
        )

    def read(self, size: int) -> float:
        """Seconds to read bytes from disk."""
        return size / self.read_bytes + self.task_seconds

    def write(self, size: int) -> float:
        """Seconds to write bytes to disk."""
        return size / self.write_bytes + self.task_seconds


def _device_costs(hardware: Hardware, product: str, disk: DiskSpeed, device: DeviceSpeed) -> DeviceCosts:
    rates = {
        "matmul": device.matmul,
        "memory_bytes_per_second": device.memory_bytes_per_second,
        "task_seconds": device.task_seconds,
    }
    compute = Costs.of(hardware.model_copy(update=rates), product, disk)
    send, receive = device.send_bytes_per_second, device.receive_bytes_per_second
    return DeviceCosts(compute, send, receive, torch_kernels=not device.fake)
