"""A user's modules -> a folder with one state dict, tensor by tensor and chunk by chunk."""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO

from packmule.data.files import Reader, atomic_folder, disk_errors
from packmule.data.safetensors import SafeTensor, read_safetensors
from packmule.models.weights.export import SHARD_BYTES, ExportDtype, Item, plain_item, write_weights
from packmule.models.weights.rows import Tensors
from packmule.shapes.module import ModuleShape

BUFFERS = "buffers.safetensors"
"""In a run's model/: what a state dict holds besides parameters."""


def write_modules(
    folder: Path,
    shape: ModuleShape,
    tensors: Tensors,
    dtype: ExportDtype,
    model_folder: Path,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write model.safetensors (or shards and an index): `embed.*`, `blocks.0.*`, ..., `head.*`, the state
    dict of a module with these three as attributes.

    The folder appears complete or not at all, in place of an older one. Memory is one chunk.

    Args: as packmule.models.weights.export.write_huggingface.

    Raises: as that.
    """
    items = []
    for block, part in zip(shape.blocks(), shape.parts, strict=True):
        for parameter, record in zip(block.parameters, part.parameters, strict=True):
            for name in (record.name, *record.aliases):
                items.append(plain_item(f"{part.name}.{name}", block, parameter, tensors, dtype))
    path = model_folder / BUFFERS
    if path.exists():
        items += [_copied(path, found) for found in read_safetensors(path)[0].values()]
    with atomic_folder(folder) as temporary, disk_errors(folder):
        write_weights(temporary, items, shard_bytes)


def _copied(path: Path, found: SafeTensor) -> Item:
    def write(file: BinaryIO) -> None:
        with Reader(path) as reader:
            file.write(reader.read(found.offset, found.bytes))

    return Item(found.name, found.shape, found.type, found.bytes, write)
