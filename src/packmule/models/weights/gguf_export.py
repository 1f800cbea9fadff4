"""A model -> one .gguf file, tensor by tensor and chunk by chunk. The header is gguf's own writer's."""

from __future__ import annotations

import os
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Literal, NamedTuple

import numpy as np

from packmule.data.files import atomic_file
from packmule.data.gguf import read_gguf
from packmule.data.gguf_config import gguf_config
from packmule.data.gguf_families import GgufFamily, family_of_config
from packmule.data.gguf_vocabulary import vocabulary_metadata
from packmule.errors import ConfigError, PackmuleError
from packmule.models.weights.decode import encode
from packmule.models.weights.gguf_metadata import difference, model_metadata
from packmule.models.weights.names import hf_tensors
from packmule.models.weights.rows import Tensors, whole_rows
from packmule.shapes.model import Block, ModelShape, Parameter

if TYPE_CHECKING:
    from gguf import GGUFWriter

GgufDtype = Literal["F32", "F16", "BF16", "Q8_0"]
_FILE_TYPES: dict[GgufDtype, int] = {"F32": 0, "F16": 1, "Q8_0": 7, "BF16": 32}
"""llama.cpp's numbers (gguf.LlamaFileType) for a file whose matrices are mostly of one encoding."""
_GROUP = 32
"""Elements that share a scale in Q8_0."""
_ALIGN = 32


class _Item(NamedTuple):
    """One tensor of the file.

    Attributes:
        sources: the parameters its rows come from, in order.
        heads: how many heads' rows are put in GGUF's RoPE order, or None.
        offset: added to each element.
        values: the tensor itself, where it follows from the settings.
    """

    name: str
    shape: tuple[int, ...]
    type: str
    sources: tuple[tuple[Block, Parameter], ...] = ()
    heads: int | None = None
    offset: float = 0.0
    values: np.ndarray | None = None

    @property
    def bytes(self) -> int:
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

        group, group_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[self.type]]
        return prod(self.shape) // group * group_bytes


def gguf_bytes(shape: ModelShape, config: Mapping[str, Any], dtype: GgufDtype) -> int:
    """Bytes of all weights in a .gguf file, without its header.

    Raises:
        ConfigError: as `write_gguf`.
    """
    return sum(_padded(item.bytes) for item in _items(shape, _family(config), dtype))


def write_gguf(
    path: Path,
    shape: ModelShape,
    config: Mapping[str, Any],
    tensors: Tensors,
    dtype: GgufDtype,
    model_folder: Path,
) -> None:
    """Write a .gguf file with weights, settings, tokenizer and chat template.

    The file appears complete or not at all, in place of an older one. Memory is the tokenizer and a few
    chunks. As llama.cpp's converter does, vectors and routers stay F32, and matrices whose rows do not
    divide into groups of 32 are F16 in a Q8_0 file.

    Args:
        config: the config.json the model came with.
        tensors: gives a parameter's elements in order, as flat float32 or float64 chunks.
        dtype: of the matrices. F16 and BF16 round to nearest even; Q8_0 has one float16 scale per 32.
        model_folder: a prepared model folder, whose tokenizer goes into the file.

    Raises:
        ConfigError: a family or a setting that GGUF files cannot hold: found by reading the header back.
        DataError: a tokenizer that GGUF cannot express, or values beyond float16.
        DiskError: the disk is full or read-only.
        ValueError: `tensors` gives too few or too many elements.
    """
    from gguf import GGUFWriter

    family = _family(config)
    items = _items(shape, family, dtype)
    settings, _ = model_metadata(shape, family)
    metadata = {
        "general.type": "model",
        **({"general.name": "Mistral"} if family.model_type == "mistral" else {}),  # for transformers
        "general.file_type": _FILE_TYPES[dtype],
        "general.quantization_version": 2,
        **settings,
        **vocabulary_metadata(model_folder, shape.vocab),
    }
    with atomic_file(path) as temporary:
        writer = GGUFWriter(temporary, family.architecture)
        try:
            for key, value in metadata.items():
                _add(writer, key, value)
            for item in items:
                _declare(writer, item)
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
        finally:
            writer.close()
        with open(temporary, "r+b") as file:
            file.seek(0, os.SEEK_END)
            _pad(file)
            file.truncate(file.tell() + sum(_padded(item.bytes) for item in items))
            vectors = [item for item in items if item.values is not None]
            for item in vectors:
                _write(file, item, tensors)
                _pad(file)
            file.flush()
            _check(temporary, shape, family)
            for item in items[len(vectors) :]:
                _write(file, item, tensors)
                _pad(file)


def _family(config: Mapping[str, Any]) -> GgufFamily:
    family = family_of_config(config.get("model_type"))
    if family is None:
        raise ConfigError(
            f".gguf files of {config.get('model_type')!r} models are not written.", "export a folder"
        )
    return family


def _check(path: Path, shape: ModelShape, family: GgufFamily) -> None:
    """A file whose weights are yet to come must describe the same model."""
    try:
        found = ModelShape.from_config(gguf_config(read_gguf(path)), str(path))
    except PackmuleError:
        found = None
    setting = "settings" if found is None else difference(shape, found)
    if setting is not None:
        raise ConfigError(
            f"GGUF cannot hold this {family.model_type} model; what the format takes for granted differs "
            f"in: {setting.replace('_', ' ')}.",
            "export a folder",
        )


def _items(shape: ModelShape, family: GgufFamily, dtype: GgufDtype) -> list[_Item]:
    vectors = model_metadata(shape, family)[1]
    computed = [_Item(name, values.shape, "F32", values=values) for name, values in vectors.items()]
    found: dict[str, list[tuple[Block, Parameter]]] = {}
    for block in shape.blocks():
        for tensor in hf_tensors(block):
            place = family.gguf_name(tensor.name)
            if place is None:
                raise ConfigError(
                    f"GGUF has no name for {tensor.name!r} of a {family.architecture}.", "export a folder"
                )
            found.setdefault(place[0], []).extend((block, parameter) for parameter in tensor.parameters)
    items = []
    for name, sources in found.items():
        experts = family.leaf(name) in family.experts
        part = sources[0][1].shape
        rows = sum(parameter.shape[0] for _, parameter in sources)
        whole = (len(sources), *part) if experts else (rows, *part[1:])
        norm = family.norm_offset if sources[0][1].role == "norm" else 0.0
        items.append(
            _Item(name, whole, _type(name, whole, dtype), tuple(sources), _heads(shape, family, name), norm)
        )
    return computed + items


def _heads(shape: ModelShape, family: GgufFamily, name: str) -> int | None:
    """How many heads' rows to put in GGUF's RoPE order, or None."""
    return (
        {"attn_q": shape.heads, "attn_k": shape.kv_heads}.get(family.leaf(name))
        if family.interleaved
        else None
    )


def _type(name: str, shape: tuple[int, ...], dtype: GgufDtype) -> str:
    if len(shape) < 2 or "ffn_gate_inp" in name or name.startswith("position_embd"):
        return "F32"
    return "F16" if dtype == "Q8_0" and shape[-1] % _GROUP else dtype


def _add(writer: GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def _declare(writer: GGUFWriter, item: _Item) -> None:
    from gguf.constants import GGMLQuantizationType

    kind = GGMLQuantizationType[item.type]
    writer.add_tensor_info(item.name, item.shape, np.dtype(np.float32), item.bytes, raw_dtype=kind)


def _padded(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN


def _pad(file: BinaryIO) -> None:
    file.write(bytes(-file.tell() % _ALIGN))


def _write(file: BinaryIO, item: _Item, tensors: Tensors) -> None:
    from gguf import GGMLQuantizationType, quants

    if item.values is not None:
        file.write(item.values.data)
        return
    kind, written = GGMLQuantizationType[item.type], 0
    for block, parameter in item.sources:
        # the elements of a bias are ordered like the rows that they are added to
        columns = 1 if len(parameter.shape) == 1 else parameter.shape[-1]
        unit = prod(parameter.shape) // columns // item.heads if item.heads else 1
        for part in whole_rows(tensors(block, parameter), columns, unit):
            rows = part.astype(np.float32, copy=False)
            if item.offset:
                rows = rows + np.float32(item.offset)
            if item.heads:
                rows = interleaved_rotation(rows, unit)
            data = quants.quantize(rows, kind) if item.type == "Q8_0" else encode(rows, item.type, item.name)
            file.write(np.ascontiguousarray(data).data)
            written += rows.size
    if written != prod(item.shape):
        raise ValueError(f"{item.name}: {written} elements given, {prod(item.shape)} expected")


def interleaved_rotation(rows: np.ndarray, head_dim: int) -> np.ndarray:
    """Rows of whole heads from Hugging Face's RoPE order to GGUF's; source.half_rotation undoes it.

    Args:
        rows: [heads * head_dim, columns].
    """
    halves = rows.reshape(-1, 2, head_dim // 2, rows.shape[-1])
    return halves.swapaxes(1, 2).reshape(rows.shape)
