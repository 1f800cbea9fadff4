"""`packmule export`: a commit's weights as a Hugging Face folder or a .gguf file. Loads no torch."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np

from packmule.checkpoint.head import Head
from packmule.checkpoint.reader import StateReader
from packmule.data.prepared import open_data
from packmule.data.prune import kept_ids, prune_model_folder, used_ids
from packmule.errors import ConfigError
from packmule.kernels import checksum
from packmule.models.weights.export import SHARD_BYTES, ExportDtype, export_bytes, write_huggingface
from packmule.models.weights.gguf_export import GgufDtype, gguf_bytes, write_gguf
from packmule.models.weights.rows import vocabulary_rows
from packmule.shapes.model import ModelShape
from packmule.spec.environment import Environment
from packmule.tiers.disk import PosixDisk
from packmule.train.commands import commit_of, prepare_text
from packmule.train.folder import RunFolder
from packmule.train.results import CutVocabulary, Exported
from packmule.train.transfer import exporter

_DTYPES: dict[str, tuple[ExportDtype | None, GgufDtype]] = {
    "bfloat16": ("bfloat16", "BF16"), "bf16": ("bfloat16", "BF16"),
    "float16": ("float16", "F16"), "fp16": ("float16", "F16"), "f16": ("float16", "F16"),
    "float32": ("float32", "F32"), "fp32": ("float32", "F32"), "f32": ("float32", "F32"),
    "q8_0": (None, "Q8_0"), "q8": (None, "Q8_0"),
}  # fmt: skip
"""Names of what weights are written as -> in a folder, in a .gguf file."""


def export(
    run: Path,
    output: Path,
    environment: Environment,
    dtype: str | None = None,
    shard_bytes: int = SHARD_BYTES,
    prune_vocab: bool = False,
    corpus: tuple[str, ...] = (),
) -> Exported:
    """Write a commit's weights as a Hugging Face folder or a .gguf file, verified on the way.

    Args:
        output: a folder, or a file whose name ends in .gguf; neither may exist.
        dtype: by default bfloat16 in a folder, float16 in a .gguf file; q8_0 in the latter only.
        shard_bytes: most bytes of weights in one file of a folder.
        prune_vocab: leave out the tokens that `corpus`, by default the run's own data, does not use.

    Raises:
        ConfigError: an unknown dtype, a family that .gguf files are not written of, or the output exists.
        PackmuleError: see the parts.
    """
    folder = RunFolder.open(run)
    head = commit_of(folder)
    output = output.expanduser()
    gguf = output.suffix.lower() == ".gguf"
    if output.exists():
        what = "file" if gguf else "folder"
        raise ConfigError(f"{output} exists already.", f"name a {what} that does not exist yet")
    if corpus and not prune_vocab:
        raise ConfigError("`--corpus` is given without `--prune-vocab`.", "add `--prune-vocab`")
    chosen = _export_dtype(dtype or ("float16" if gguf else "bfloat16"), gguf)
    with (
        StateReader.open(PosixDisk(), folder.state, checksum()) as reader,
        tempfile.TemporaryDirectory(prefix="packmule-export-", dir=folder.path) as temporary,
    ):
        tensors, model, config = exporter(reader), folder.model, folder.model_config()
        shape = folder.shape()
        before = _export_bytes(shape, config, chosen)
        cut: CutVocabulary | None = None
        if prune_vocab:
            kept = _corpus_ids(folder, environment, corpus, head, Path(temporary))
            model = Path(temporary) / "pruned"
            model.mkdir()
            config = prune_model_folder(folder.model, model, kept)
            tensors = vocabulary_rows(tensors, kept)
            whole, shape = shape, ModelShape.from_config(config, str(model / "config.json"))
            saved = before - _export_bytes(shape, config, chosen)
            cut = CutVocabulary(before=whole.vocab, after=shape.vocab, bytes_saved=saved)
        if gguf:
            write_gguf(output, shape, config, tensors, cast(GgufDtype, chosen), model)
        else:
            write_huggingface(output, shape, config, tensors, cast(ExportDtype, chosen), model, shard_bytes)
    size = _export_bytes(shape, config, chosen)
    return Exported(output=str(output), dtype=chosen, weight_bytes=size, vocabulary=cut)


def _export_dtype(name: str, gguf: bool) -> str:
    known = _DTYPES.get(name.lower())
    chosen = None if known is None else known[1 if gguf else 0]
    if chosen is None:
        if known is not None:
            raise ConfigError(f"`--dtype {name}` is for .gguf files.", "name an output that ends in .gguf")
        offered = dict.fromkeys(pair[1 if gguf else 0] for pair in _DTYPES.values())
        raise ConfigError(f"`--dtype` {name!r} is not offered.", f"use {', '.join(filter(None, offered))}")
    return chosen


def _export_bytes(shape: ModelShape, config: Mapping[str, Any], dtype: str) -> int:
    if dtype in ("bfloat16", "float16", "float32"):
        return export_bytes(shape, cast(ExportDtype, dtype))
    return gguf_bytes(shape, config, cast(GgufDtype, dtype))


def _corpus_ids(
    folder: RunFolder, environment: Environment, corpus: tuple[str, ...], head: Head, temporary: Path
) -> np.ndarray:
    """The ids that stay when the vocabulary is cut down to a corpus, or to the run's data."""
    data = folder.data
    if corpus:
        data = temporary / "data"
        prepare_text(folder, environment, corpus, head, temporary)
    found = open_data(data)
    used = used_ids(found.store, folder.shape().vocab)
    for held_out in found.validation:
        used |= used_ids(held_out.store, len(used))
    return kept_ids(folder.model, used)
