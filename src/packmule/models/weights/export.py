"""A model -> a Hugging Face folder, tensor by tensor and chunk by chunk."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple

import numpy as np

from packmule.data.files import atomic_folder, disk_errors, write_json
from packmule.data.model_files import copy_model_files
from packmule.models.weights.decode import encode
from packmule.models.weights.names import HfTensor, hf_tensors
from packmule.models.weights.rows import Tensors
from packmule.shapes.families import FAMILIES
from packmule.shapes.model import Block, ModelShape, Parameter
from packmule.shapes.module import Shape

ExportDtype = Literal["bfloat16", "float16", "float32"]
SHARD_BYTES = 5_000_000_000
_CODES = {"bfloat16": ("BF16", 2), "float16": ("F16", 2), "float32": ("F32", 4)}


class Item(NamedTuple):
    """One tensor of a file.

    Attributes:
        type: as safetensors names it.
        write: writes so many bytes.
    """

    name: str
    shape: tuple[int, ...]
    type: str
    bytes: int
    write: Callable[[BinaryIO], None]


def export_bytes(shape: Shape, dtype: ExportDtype) -> int:
    """Bytes of all weights in an export, without headers."""
    return shape.numel * _CODES[dtype][1]


def write_huggingface(
    folder: Path,
    shape: ModelShape,
    config: Mapping[str, Any],
    tensors: Tensors,
    dtype: ExportDtype = "bfloat16",
    model_folder: Path | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write model.safetensors (or shards and an index), config.json and the tokenizer's files.

    The folder appears complete or not at all, in place of an older one. Memory is one chunk.

    Args:
        config: the config.json the model came with; architecture and dtype are set here.
        tensors: gives a parameter's elements in order, as flat float32 or float64 chunks.
        dtype: of the weights; rounded to nearest even.
        model_folder: a prepared model folder whose tokenizer and generation files are copied.
        shard_bytes: most bytes of weights in one file (but at least one tensor).

    Raises:
        DataError: values beyond float16.
        DiskError: the disk is full or read-only.
        ValueError: `tensors` gives too few or too many elements.
    """
    items = [item(block, tensor, tensors, dtype) for block in shape.blocks() for tensor in hf_tensors(block)]
    with atomic_folder(folder) as temporary, disk_errors(folder):
        write_weights(temporary, items, shard_bytes)
        # transformers 5 reads dtype, older versions torch_dtype
        stated = {
            "architectures": [FAMILIES[shape.family].architecture],
            "dtype": dtype,
            "torch_dtype": dtype,
        }
        write_json(temporary / "config.json", {**config, **stated})
        if model_folder is not None:
            copy_model_files(model_folder, temporary)


def item(block: Block, tensor: HfTensor, tensors: Tensors, dtype: ExportDtype) -> Item:
    """A tensor of a model as one of a file, its parameters one below the other."""

    def write(file: BinaryIO) -> int:
        chunks = chain.from_iterable(tensors(block, parameter) for parameter in tensor.parameters)
        if tensor.transposed:
            return _write_columns(file, tensor, chunks, dtype)
        return _write_rows(file, tensor.name, chunks, dtype)

    return _checked(tensor.name, tensor.shape, dtype, write)


def plain_item(name: str, block: Block, parameter: Parameter, tensors: Tensors, dtype: ExportDtype) -> Item:
    """A parameter as a tensor of a file, by a name of its own."""
    return _checked(
        name, parameter.shape, dtype, lambda file: _write_rows(file, name, tensors(block, parameter), dtype)
    )


def _checked(name: str, shape: tuple[int, ...], dtype: ExportDtype, write: Callable[[BinaryIO], int]) -> Item:
    """An item whose `write` says how many elements it has written."""
    code, itemsize = _CODES[dtype]

    def checked(file: BinaryIO) -> None:
        written = write(file)
        if written != prod(shape):
            raise ValueError(f"{name}: {written} elements given, {prod(shape)} expected")

    return Item(name, tuple(shape), code, prod(shape) * itemsize, checked)


def write_weights(folder: Path, items: list[Item], shard_bytes: int = SHARD_BYTES) -> None:
    """Write model.safetensors, or shards and an index."""
    shards, names = _shards(items, shard_bytes), dict[str, str]()
    for number, shard in enumerate(shards, 1):
        name = "model.safetensors"
        if len(shards) > 1:
            name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        with open(folder / name, "wb") as file:
            _write_shard(file, shard)
        names.update((item.name, name) for item in shard)
    if len(shards) > 1:
        total = sum(item.bytes for item in items)
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(names.items()))}
        write_json(folder / "model.safetensors.index.json", index)


def _shards(items: list[Item], limit: int) -> list[list[Item]]:
    shards: list[list[Item]] = [[]]
    size = 0
    for item in items:
        if shards[-1] and size + item.bytes > limit:
            shards.append([])
            size = 0
        shards[-1].append(item)
        size += item.bytes
    return shards


def _write_shard(file: BinaryIO, items: list[Item]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for item in items:
        end = offset + item.bytes
        header[item.name] = {
            "dtype": item.type,
            "shape": list(item.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    for item in items:
        item.write(file)


def _write_rows(file: BinaryIO, name: str, chunks: Iterable[np.ndarray], dtype: ExportDtype) -> int:
    """One chunk after the other; returns the number of elements."""
    written = 0
    for chunk in chunks:
        file.write(encode(chunk, _CODES[dtype][0], name).data)
        written += chunk.size
    return written


def _write_columns(file: BinaryIO, tensor: HfTensor, chunks: Iterable[np.ndarray], dtype: ExportDtype) -> int:
    """Chunks of rows as columns of a transposed tensor; returns the number of elements."""
    outputs, inputs = tensor.whole
    itemsize, start, done = _CODES[dtype][1], file.tell(), 0
    left = np.empty(0, np.float32)
    for chunk in chunks:
        values = np.concatenate((left, chunk)) if len(left) else chunk
        rows = len(values) // inputs
        left = values[rows * inputs :]
        columns = encode(values[: rows * inputs].reshape(rows, inputs).T, _CODES[dtype][0], tensor.name)
        for index, column in enumerate(columns if done + rows <= outputs else ()):
            file.seek(start + (index * outputs + done) * itemsize)
            file.write(column.data)
        done += rows
    file.seek(start + outputs * inputs * itemsize)
    return done * inputs + len(left)
