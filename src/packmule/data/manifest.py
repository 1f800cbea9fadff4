"""Where a model's weights lie: one entry per tensor, under its Hugging Face name.

The manifest is written once (weights.json) from the headers of a GGUF file or a Hugging Face
folder; packmule.models.weights reads tensors through it without opening a header again.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from packmule.data.files import Reader, read_json, read_text
from packmule.data.gguf import GgufHeader, read_gguf
from packmule.data.safetensors import read_safetensors
from packmule.errors import DataError
from packmule.spec.records import Record

MANIFEST = "weights.json"

_GGUF_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GGUF_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}


class WeightFile(Record):
    """A file that tensors lie in; bytes and header hash tell whether it is still the same."""

    path: str
    bytes: int
    header_bytes: int
    header_sha256: str


class WeightEntry(Record):
    """One tensor: `rows` of `row_bytes` bytes from `offset` of file number `file`."""

    name: str = Field(description="Hugging Face name")
    shape: tuple[int, ...]
    type: str = Field(description="encoding: a ggml type or a safetensors dtype")
    file: int = Field(ge=0)
    offset: int = Field(ge=0)
    row_bytes: int = Field(ge=0)
    interleaved_heads: int | None = Field(
        default=None, description="heads whose rows lie in GGUF's interleaved RoPE order, or null"
    )

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
    """The tensors of a llama GGUF file.

    Raises:
        DataError: damaged, or it holds a tensor that no Llama has.
    """
    header = read_gguf(path)
    heads = header.count("llama.attention.head_count")
    kv_heads = header.count("llama.attention.head_count_kv", heads)
    entries = []
    for tensor in header.tensors.values():
        name = _hf_name(header, tensor.name)
        # llama.cpp stores q and k so that each RoPE pair lies in neighbouring rows
        interleaved = heads if ".q_proj." in name else kv_heads if ".k_proj." in name else None
        entries.append(
            WeightEntry(
                name=name,
                shape=tensor.shape,
                type=tensor.type,
                file=0,
                offset=tensor.offset,
                row_bytes=tensor.bytes // max(1, prod(tensor.shape[:-1])),
                interleaved_heads=interleaved,
            )
        )
    return Manifest(kind="gguf", files=(_weight_file(path, header.bytes),), tensors=tuple(entries))


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


def _hf_name(header: GgufHeader, name: str) -> str:
    if name in _GGUF_TOP:
        return _GGUF_TOP[name]
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", name)
    if match and match[2] in _GGUF_LAYER:
        return f"model.layers.{match[1]}.{_GGUF_LAYER[match[2]]}.weight"
    raise DataError(
        f"{header.path}: tensor {name!r} belongs to no Llama decoder that packmule trains.",
        "give a plain Llama model: no biases, no experts, no RoPE frequency factors",
    )
