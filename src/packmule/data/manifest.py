"""Where a model's weights lie: one entry per tensor, under its Hugging Face name.

The manifest is written once (weights.json) from the headers of a GGUF file or a Hugging Face
folder; packmule.models.weights reads tensors through it without opening a header again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, NonNegativeInt

from packmule.data.files import Reader, read_json, read_text
from packmule.data.gguf import GgufHeader, GgufTensor, read_gguf
from packmule.data.gguf_families import COMPUTED, GgufFamily, family_of_file
from packmule.data.safetensors import read_safetensors
from packmule.errors import DataError
from packmule.spec.records import Record

MANIFEST = "weights.json"
_MAX_EXPERTS = 1 << 16
_LONGEST = 200
"""Characters of a file's name; file systems take 255 bytes."""


class WeightFile(Record):
    """A file that tensors lie in; bytes and header hash tell whether it is still the same."""

    path: str
    bytes: int
    header_bytes: int
    header_sha256: str


class WeightEntry(Record):
    """One tensor: `rows` of `row_bytes` bytes from `offset` of file number `file`."""

    name: str = Field(description="Hugging Face name")
    shape: tuple[NonNegativeInt, ...]
    type: str = Field(description="encoding: a ggml type or a safetensors dtype")
    file: int = Field(ge=0)
    offset: int = Field(ge=0)
    row_bytes: int = Field(ge=0)
    interleaved_heads: int | None = Field(
        default=None, ge=1, description="heads whose rows lie in GGUF's interleaved RoPE order, or null"
    )
    subtract: float = Field(default=0.0, description="from every element, as read")

    @property
    def rows(self) -> int:
        """The first dimension of a matrix; a vector is one row."""
        return prod(self.shape[:-1])

    @property
    def columns(self) -> int:
        """Elements of one row."""
        return self.shape[-1]


class Manifest(Record):
    """All tensors of one model, or the seed of a random one."""

    format: int = 1
    kind: Literal["gguf", "safetensors", "random"]
    seed: int = Field(default=0, description="of random weights")
    deviation: float = Field(default=0.02, description="standard deviation of random weights")
    files: tuple[WeightFile, ...] = ()
    tensors: tuple[WeightEntry, ...] = ()

    @classmethod
    def open(cls, folder: Path) -> Manifest:
        """Read weights.json of a prepared model folder.

        Raises:
            DataError, ConfigError: missing, damaged, or of another version.
        """
        path = folder / MANIFEST
        return cls.parse_json(read_text(path), str(path))


def random_manifest(config: Mapping[str, Any], seed: int) -> Manifest:
    """Weights drawn from the config's `initializer_range` (default 0.02)."""
    return Manifest(kind="random", seed=seed, deviation=float(config.get("initializer_range", 0.02)))


def gguf_manifest(path: Path) -> Manifest:
    """The tensors of a GGUF file, a tensor that holds all experts as one entry per expert.

    Raises:
        DataError: damaged, of an unknown architecture, or with a tensor that the architecture has not.
    """
    header = read_gguf(path)
    family = family_of_file(header)
    name = family.architecture
    heads = header.count(f"{name}.attention.head_count")
    kv_heads = header.count(f"{name}.attention.head_count_kv", heads)
    entries = []
    for tensor in header.tensors.values():
        if tensor.name not in COMPUTED:
            turned = {"attn_q": heads, "attn_k": kv_heads}.get(family.leaf(tensor.name))
            entries += _gguf_entries(header, family, tensor, turned if family.interleaved else None)
    return Manifest(kind="gguf", files=(_weight_file(path, header.bytes),), tensors=tuple(entries))


def _gguf_entries(
    header: GgufHeader, family: GgufFamily, tensor: GgufTensor, heads: int | None
) -> list[WeightEntry]:
    if family.huggingface_name(tensor.name) is None:
        raise DataError(
            f"{header.path}: tensor {tensor.name!r:.80} belongs to no {family.model_type} model.",
            "give the model's Hugging Face folder",
        )
    leaf = family.leaf(tensor.name)
    several = leaf in family.experts
    shape = tensor.shape[1:] if several else tensor.shape
    if not shape or (several and len(shape) != 2):
        raise DataError(
            f"{header.path}: tensor {tensor.name!r:.80} has the shape {list(tensor.shape)}.",
            "get the model again",
        )
    numbers = range(tensor.shape[0]) if several else [None]
    if len(numbers) > _MAX_EXPERTS:
        raise DataError(
            f"{header.path}: {len(numbers)} experts in {tensor.name!r:.80}.", "get the model again"
        )
    size = tensor.bytes // len(numbers)
    return [
        WeightEntry(
            name=str(family.huggingface_name(tensor.name, expert)),
            shape=shape,
            type=tensor.type,
            file=0,
            offset=tensor.offset + (expert or 0) * size,
            row_bytes=size // prod(shape[:-1]),
            interleaved_heads=heads,
            subtract=family.norm_offset if "norm" in leaf else 0.0,
        )
        for expert in numbers
    ]


def folder_manifest(folder: Path) -> Manifest:
    """The tensors of a Hugging Face folder: model.safetensors or a sharded index.

    Raises:
        DataError: no safetensors files, or damaged ones, or an index that does not match them.
    """
    files, entries = list[WeightFile](), list[WeightEntry]()
    owner: dict[str, str] = {}
    for path, names in _shards(folder):
        tensors, header_bytes = read_safetensors(path)
        for name in names if names is not None else tensors:
            if name not in tensors:
                raise DataError(
                    f"{path} does not hold {name!r}, which the index says it does.", "get the model again"
                )
            if name in owner:
                raise DataError(f"{name!r} is in both {owner[name]} and {path}.", "get the model again")
            tensor, owner[name] = tensors[name], str(path)
            rows = max(1, prod(tensor.shape[:-1]))
            entry = WeightEntry(
                name=name,
                shape=tensor.shape,
                type=tensor.type,
                file=len(files),
                offset=tensor.offset,
                row_bytes=tensor.bytes // rows,
            )
            entries += _each_expert(entry)
        files.append(_weight_file(path, header_bytes))
    return Manifest(kind="safetensors", files=tuple(files), tensors=tuple(entries))


_STACKED = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


def _each_expert(entry: WeightEntry) -> list[WeightEntry]:
    """The matrices of each expert, where a tensor holds those of all: [experts, rows, columns], the
    matrices of one below each other (what transformers 5 keeps in memory, and writes if told to)."""
    layer, _, name = entry.name.rpartition(".experts.")
    if len(entry.shape) != 3 or not layer or name not in _STACKED:
        return [entry]
    (count, rows, columns), names = entry.shape, _STACKED[name]
    found, size = [], rows // len(names)
    for expert in range(count):
        for number, local in enumerate(names):
            start = expert * rows + number * size
            update = {
                "name": f"{layer}.experts.{expert}.{local}.weight",
                "shape": (size, columns),
                "offset": entry.offset + start * entry.row_bytes,
            }
            found.append(entry.model_copy(update=update))
    return found


def _shards(folder: Path) -> list[tuple[Path, list[str] | None]]:
    index = folder / "model.safetensors.index.json"
    single = folder / "model.safetensors"
    if single.exists():
        return [(single, None)]
    if not index.exists():
        others = sorted(p.name for p in folder.glob("*.bin")) or sorted(p.name for p in folder.glob("*.gguf"))
        found = f" (found {', '.join(others[:3])})" if others else ""
        raise DataError(
            f"{folder} holds no model.safetensors and no model.safetensors.index.json{found}.",
            "give a .gguf file itself, or save the model with `save_pretrained(folder)`",
        )
    names = read_json(index).get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(file, str) for file in names.values()):
        raise DataError(f"{index} has no `weight_map`.", "get the model again")
    by_file: dict[str, list[str]] = {}
    for name, file in names.items():
        if Path(file).name != file:
            raise DataError(f"{index}: {name!r} points outside the folder: {file!r}.", "get the model again")
        by_file.setdefault(file, []).append(name)
    missing = [file for file in sorted(by_file) if len(file) > _LONGEST or not (folder / file).is_file()]
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        shown = ", ".join(f"{file!r:.80}" for file in missing[:3])
        raise DataError(
            f"{folder}: {shown}{more} of {len(by_file)} weight files "
            f"{'is' if len(missing) == 1 else 'are'} missing.",
            f"get the files that {index.name} names",
        )
    return [(folder / file, by_file[file]) for file in sorted(by_file)]


def _weight_file(path: Path, header_bytes: int) -> WeightFile:
    digest = hashlib.sha256()
    with Reader(path) as reader:
        for offset in range(0, header_bytes, 1 << 20):
            digest.update(reader.read(offset, min(1 << 20, header_bytes - offset)))
        return WeightFile(
            path=str(path.resolve()),
            bytes=reader.bytes,
            header_bytes=header_bytes,
            header_sha256=digest.hexdigest(),
        )
