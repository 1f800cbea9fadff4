"""Typed tensors inside one untyped buffer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from packmule.shapes.layout import Layout

TORCH_DTYPES: dict[str, torch.dtype] = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "int64": torch.int64,
    "int32": torch.int32,
}


def views(buffer: torch.Tensor, layout: Layout) -> dict[str, torch.Tensor]:
    """The tensors of a layout, sharing the buffer's memory; nothing is copied.

    Args:
        buffer: uint8 [at least layout.bytes], contiguous, starting on a 64-byte boundary.
        layout: names, shapes, dtypes and offsets.

    Raises:
        ValueError: the buffer is shorter than the layout.
    """
    if buffer.numel() < layout.bytes:
        raise ValueError(f"a layout of {layout.bytes} bytes does not fit a buffer of {buffer.numel()}")
    return {
        entry.name: buffer[entry.offset : entry.offset + entry.bytes]
        .view(TORCH_DTYPES[entry.dtype])
        .view(entry.shape)
        for entry in layout.entries
    }
