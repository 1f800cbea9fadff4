"""Weights of every family: an export loads in transformers, comes back bit for bit, and a random start
is drawn as transformers draws it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from tests.parity.architectures import ARCHITECTURES, Architecture, Config
from tests.parity.oracle import build, oracle, unstacked
from tests.parity.plain import PlainModel

from packmule.data.files import write_text
from packmule.data.manifest import MANIFEST, folder_manifest, random_manifest
from packmule.errors import DataError
from packmule.kernels import load
from packmule.models.weights.export import write_huggingface
from packmule.models.weights.names import hf_tensors
from packmule.models.weights.source import WeightSource
from packmule.shapes.model import Block, ModelShape, Parameter

BY_ROW = pytest.mark.parametrize("row", ARCHITECTURES, ids=lambda row: row.name)


def model_of(row: Architecture, seed: int) -> tuple[Config, PlainModel]:
    """A random model in fp32."""
    config = row.config(random.Random(seed))
    shape = ModelShape.from_config(config, row.name)
    return config, PlainModel(shape, "fp32", seed, load(1, "torch"))


def export(folder: Path, config: Config, model: PlainModel) -> None:
    """Write a Hugging Face folder in fp32, given in uneven chunks."""

    def tensors(block: Block, parameter: Parameter) -> Iterator[np.ndarray]:
        flat = model.params[block.index][parameter.name].numpy().reshape(-1)
        for at in range(0, len(flat), 77):
            yield flat[at : at + 77]

    write_huggingface(folder, model.shape, config, tensors, "float32", shard_bytes=60_000)


@BY_ROW
def test_transformers_loads_the_export_with_equal_logits(
    row: Architecture, tmp_path: Path, seed: int
) -> None:
    config, model = model_of(row, seed)
    export(tmp_path / "out", config, model)
    eager = {"attn_implementation": "eager"}
    if has_experts(model.shape):
        eager["experts_implementation"] = "eager"
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32, **eager)
    ids = torch.randint(0, model.shape.vocab, (2, 17), generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        assert torch.equal(loaded.eval()(ids).logits, oracle(model, config)(ids).logits)


@BY_ROW
def test_an_export_is_imported_again_bit_for_bit(row: Architecture, tmp_path: Path, seed: int) -> None:
    config, model = model_of(row, seed)
    export(tmp_path / "out", config, model)
    write_text(tmp_path / MANIFEST, folder_manifest(tmp_path / "out").to_json())
    with WeightSource.open(tmp_path) as source:
        source.check(model.shape)
        for block, named in zip(model.blocks, model.params, strict=True):
            for parameter in block.parameters:
                found, at = [], 0
                for first, values in source.chunks(block, parameter, chunk_bytes=1000):
                    assert first == at
                    found.append(values.copy())
                    at += len(values)
                assert np.array_equal(np.concatenate(found), named[parameter.name].numpy().reshape(-1)), (
                    parameter.name
                )


@BY_ROW
def test_a_missing_or_misshapen_tensor_is_named(row: Architecture, tmp_path: Path, seed: int) -> None:
    config, model = model_of(row, seed)
    export(tmp_path / "out", config, model)
    manifest = folder_manifest(tmp_path / "out")
    rng = random.Random(seed)
    lost = rng.choice([entry for entry in manifest.tensors])
    wrong = lost.model_copy(update={"shape": (*lost.shape[:-1], lost.shape[-1] + 1)})
    for kept, message in (
        ([e for e in manifest.tensors if e is not lost], "is missing"),
        ([wrong if e is lost else e for e in manifest.tensors], "but config.json asks for"),
    ):
        write_text(tmp_path / MANIFEST, manifest.model_copy(update={"tensors": tuple(kept)}).to_json())
        with WeightSource.open(tmp_path) as source, pytest.raises(DataError, match=message) as caught:
            source.check(model.shape)
        assert repr(lost.name) in caught.value.cause


@BY_ROW
def test_random_weights_have_the_mean_and_deviation_of_transformers(
    row: Architecture, tmp_path: Path, seed: int
) -> None:
    config = {**row.config(random.Random(seed)), "initializer_range": 0.07}
    shape = ModelShape.from_config(config, row.name)
    theirs = dict(build(config, torch.float32).named_parameters())
    write_text(tmp_path / MANIFEST, random_manifest(config, seed).to_json())
    with WeightSource.open(tmp_path) as source:
        for block in shape.blocks():
            for tensor in hf_tensors(block):
                ours = np.concatenate([v for p in tensor.parameters for _, v in source.chunks(block, p)])
                other = unstacked(row.model_type, theirs, tensor.name).detach().numpy()
                deviation = float(other.std())
                if deviation == 0:
                    assert np.array_equal(ours, other.reshape(-1)), tensor.name
                    continue
                # Six standard errors of the mean, and of the logarithm of a deviation, of two samples.
                error = 6 * (2 / other.size) ** 0.5
                assert abs(float(ours.mean() - other.mean())) < error * deviation, tensor.name
                assert abs(np.log(float(ours.std()) / deviation)) < error, tensor.name


def has_experts(shape: ModelShape) -> bool:
    return any(layer.experts is not None for layer in shape.layer_shapes)


@pytest.mark.parametrize("each", (True, False), ids=("one tensor per expert", "stacked"))
@pytest.mark.parametrize("name", ("mixtral", "qwen3_moe"))
def test_what_transformers_saves_is_read_bit_for_bit(
    name: str, each: bool, tmp_path: Path, seed: int
) -> None:
    """A matrix per expert by default; those of all experts in one tensor where it is told to."""
    config, model = model_of(next(row for row in ARCHITECTURES if row.name == name), seed)
    oracle(model, config).save_pretrained(tmp_path / "out", save_original_format=each)
    write_text(tmp_path / MANIFEST, folder_manifest(tmp_path / "out").to_json())
    with WeightSource.open(tmp_path) as source:
        source.check(model.shape)
        for block, named in zip(model.blocks, model.params, strict=True):
            for parameter in block.parameters:
                values = np.concatenate([v.copy() for _, v in source.chunks(block, parameter, 1000)])
                assert np.array_equal(values, named[parameter.name].numpy().reshape(-1)), parameter.name


def test_gpt2_files_without_the_outer_name_are_read(tmp_path: Path, seed: int) -> None:
    """As the first GPT-2 files are: no "transformer." and with the causal mask as a buffer."""
    row = next(row for row in ARCHITECTURES if row.name == "gpt2")
    config, model = model_of(row, seed)
    export(tmp_path / "out", config, model)
    manifest = folder_manifest(tmp_path / "out")
    short = [e.model_copy(update={"name": e.name.removeprefix("transformer.")}) for e in manifest.tensors]
    mask = short[0].model_copy(update={"name": "h.0.attn.bias"})
    old = manifest.model_copy(update={"tensors": (*short, mask)})
    write_text(tmp_path / MANIFEST, old.to_json())
    with WeightSource.open(tmp_path) as source:
        source.check(model.shape)
