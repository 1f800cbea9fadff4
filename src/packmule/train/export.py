"""`packmule export`: weights as a Hugging Face folder or a .gguf file. Loads no torch."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np

from packmule.checkpoint.reader import StateReader
from packmule.data.files import disk_errors, read_json
from packmule.data.model_files import prepare_model
from packmule.data.prune import ids_of_data, prune_model_folder
from packmule.errors import ConfigError
from packmule.kernels import checksum
from packmule.models.weights.export import SHARD_BYTES, ExportDtype, export_bytes, write_huggingface
from packmule.models.weights.gguf_export import GgufDtype, gguf_bytes, write_gguf
from packmule.models.weights.module_export import write_modules
from packmule.models.weights.rows import Tensors, vocabulary_rows
from packmule.models.weights.source import WeightSource
from packmule.shapes.model import Block, ModelShape, Parameter
from packmule.shapes.module import ModuleShape
from packmule.spec.environment import Environment
from packmule.spec.job import Data
from packmule.tiers.disk import PosixDisk
from packmule.train.commands import commit_of, prepare_text
from packmule.train.folder import RunFolder
from packmule.train.results import CutVocabulary, Exported
from packmule.train.situation import model_folder
from packmule.train.transfer import exporter

_DTYPES: dict[str, tuple[ExportDtype | None, GgufDtype]] = {
    "bfloat16": ("bfloat16", "BF16"), "bf16": ("bfloat16", "BF16"),
    "float16": ("float16", "F16"), "fp16": ("float16", "F16"), "f16": ("float16", "F16"),
    "float32": ("float32", "F32"), "fp32": ("float32", "F32"), "f32": ("float32", "F32"),
    "q8_0": (None, "Q8_0"), "q8": (None, "Q8_0"),
}  # fmt: skip
"""Names of what weights are written as -> in a folder, in a .gguf file."""


CORPUS_ROW = 2048
"""Tokens of a row where a corpus is read with no run to say: rows are not used."""


@dataclass(frozen=True)
class _Origin:
    """What is exported.

    Attributes:
        model: its prepared model folder.
        data: OUT/data of the run that it is of, if any.
    """

    tensors: Tensors
    shape: ModelShape
    config: Mapping[str, Any]
    model: Path
    data: Path | None = None
    reading: Data = field(default_factory=Data)


def export(
    source: Path,
    output: Path,
    environment: Environment,
    dtype: str | None = None,
    shard_bytes: int = SHARD_BYTES,
    prune_vocab: bool = False,
    corpus: tuple[str, ...] = (),
) -> Exported:
    """Write weights as a Hugging Face folder or a .gguf file; a commit's are verified on the way.

    Args:
        source: a run, a snapshot in it, or a model: a Hugging Face folder or a .gguf file.
        output: a folder, or a file whose name ends in .gguf; neither may exist.
        dtype: by default bfloat16 in a folder, float16 in a .gguf file; q8_0 in the latter only.
        shard_bytes: most bytes of weights in one file of a folder.
        prune_vocab: leave out the tokens that `corpus`, by default the run's own data, does not use.

    Raises:
        ConfigError: an unknown dtype, a family that .gguf files are not written of, the output exists, or
            there is nothing that the vocabulary could be cut to.
        PackmuleError: see the parts.
    """
    source, output = source.expanduser(), output.expanduser()
    source = source if source.exists() else model_folder(source)
    folder = RunFolder.at(source)
    if folder is None and not (source.is_file() or (source / "config.json").exists()):
        raise ConfigError(
            f"{source} is neither a run nor a model.",
            "give the output folder of `packmule train`, a checkpoint-N in it, a model folder or .gguf file",
        )
    modules = None if folder is None else folder.module_shape()
    if folder is not None and modules is not None:
        commit_of(folder)
        return _export_modules(folder, modules, output, dtype, shard_bytes, prune_vocab)
    gguf = output.suffix.lower() == ".gguf"
    if output.exists():
        what = "file" if gguf else "folder"
        raise ConfigError(f"{output} exists already.", f"name a {what} that does not exist yet")
    if corpus and not prune_vocab:
        raise ConfigError("`--corpus` is given without `--prune-vocab`.", "add `--prune-vocab`")
    if prune_vocab and folder is None and not corpus:
        raise ConfigError(
            f"{source} is a model, which has no data that its vocabulary could be cut to.",
            "add `--corpus PATH`, the text that it is for",
        )
    chosen = _export_dtype(dtype or ("float16" if gguf else "bfloat16"), gguf)
    place = output.absolute().parent if folder is None else folder.path
    with disk_errors(place):
        place.mkdir(parents=True, exist_ok=True)
        temporary = tempfile.TemporaryDirectory(prefix="packmule-export-", dir=place)
    with temporary as work, _origin(folder, source, Path(work)) as origin:
        tensors, model, config, shape = origin.tensors, origin.model, origin.config, origin.shape
        before = _export_bytes(shape, config, chosen)
        cut: CutVocabulary | None = None
        if prune_vocab:
            kept = _corpus_ids(origin, environment, corpus, Path(work))
            model = Path(work) / "pruned"
            model.mkdir()
            config = prune_model_folder(origin.model, model, kept)
            tensors = vocabulary_rows(tensors, kept)
            shape = ModelShape.from_config(config, str(model / "config.json"))
            saved = before - _export_bytes(shape, config, chosen)
            cut = CutVocabulary(before=origin.shape.vocab, after=shape.vocab, bytes_saved=saved)
        if gguf:
            write_gguf(output, shape, config, tensors, cast(GgufDtype, chosen), model)
        else:
            write_huggingface(output, shape, config, tensors, cast(ExportDtype, chosen), model, shard_bytes)
    size = _export_bytes(shape, config, chosen)
    return Exported(output=str(output), dtype=chosen, weight_bytes=size, vocabulary=cut)


@contextmanager
def _origin(folder: RunFolder | None, source: Path, temporary: Path) -> Iterator[_Origin]:
    """A run's last commit, or a model as it is."""
    if folder is not None:
        commit_of(folder)
        with StateReader.open(PosixDisk(), folder.state, checksum()) as reader:
            yield _Origin(
                exporter(reader),
                folder.decoder_shape(),
                folder.model_config(),
                folder.model,
                folder.data,
                folder.job().data,
            )
        return
    model = temporary / "model"
    prepare_model(source, model)
    config = read_json(model / "config.json")
    shape = ModelShape.from_config(config, str(source))
    with WeightSource.open(model) as weights:
        weights.check(shape)

        blocks = shape.blocks()

        def tensors(block: Block, parameter: Parameter) -> Iterable[np.ndarray]:
            whole = blocks[block.index]  # of what is read: the caller's may have fewer rows
            found = next(own for own in whole.parameters if own.name == parameter.name)
            return (values for _, values in weights.chunks(whole, found))

        yield _Origin(tensors, shape, config, model)


def _export_modules(
    folder: RunFolder, shape: ModuleShape, output: Path, dtype: str | None, shard_bytes: int, prune: bool
) -> Exported:
    """A state dict of modules of one's own; nothing of them is imported."""
    if prune or output.suffix.lower() == ".gguf":
        what = "vocabulary" if prune else "place in a .gguf file"
        raise ConfigError(
            f"The model in {folder.path} is made of modules of your own, which have no {what}.",
            "name a folder: `packmule export RUN FOLDER` writes their state dict",
        )
    if output.exists():
        raise ConfigError(f"{output} exists already.", "name a folder that does not exist yet")
    chosen = cast(ExportDtype, _export_dtype(dtype or "float32", gguf=False))
    with StateReader.open(PosixDisk(), folder.state, checksum()) as reader:
        write_modules(output, shape, exporter(reader), chosen, folder.model, shard_bytes)
    return Exported(output=str(output), dtype=chosen, weight_bytes=export_bytes(shape, chosen))


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
    origin: _Origin, environment: Environment, corpus: tuple[str, ...], temporary: Path
) -> np.ndarray:
    """The ids that stay when the vocabulary is cut down to a corpus, or to the run's data."""
    data = origin.data
    if corpus or data is None:
        data = temporary / "data"
        prepare_text(origin.model, environment, corpus, origin.reading, CORPUS_ROW, temporary)
    return ids_of_data(data, origin.model, origin.shape.vocab)
