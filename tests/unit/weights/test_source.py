"""Weights read from GGUF and safetensors, or drawn, equal independent references bit for bit."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tests.unit.data.samples import close
from tests.unit.weights import k_quants

from packmule.data.files import write_json, write_text
from packmule.data.gguf import read_gguf
from packmule.data.gguf_config import gguf_config
from packmule.data.manifest import MANIFEST, Manifest, folder_manifest, gguf_manifest, random_manifest
from packmule.errors import ConfigError, DataError
from packmule.models.weights.decode import decoder
from packmule.models.weights.names import hf_name
from packmule.models.weights.source import WeightSource
from packmule.shapes.model import Block, ModelShape, Parameter

SHAPE = ModelShape(
    vocab=96, hidden=64, layers=2, heads=4, kv_heads=2, head_dim=16, ffn=96, norm_eps=1e-5,
    rope_theta=5e5, tied=False, max_positions=128,
)  # fmt: skip
TYPES = ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"]
GGUF_NAMES = {
    "norm1.weight": "attn_norm", "q.weight": "attn_q", "k.weight": "attn_k", "v.weight": "attn_v",
    "o.weight": "attn_output", "norm2.weight": "ffn_norm", "gate.weight": "ffn_gate", "up.weight": "ffn_up",
    "down.weight": "ffn_down",
}  # fmt: skip

Parameters = list[tuple[Block, Parameter]]


def parameters(shape: ModelShape) -> Parameters:
    return [(block, parameter) for block in shape.blocks() for parameter in block.parameters]


def random_weights(shape: ModelShape, seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {hf_name(b, p): rng.standard_normal(p.shape, np.float32) for b, p in parameters(shape)}


def permute(weights: np.ndarray, heads: int) -> np.ndarray:
    """As llama.cpp's converter does it (convert_hf_to_gguf.py, LlamaModel.permute)."""
    rows = weights.shape[0] // heads // 2
    return weights.reshape(heads, 2, rows, weights.shape[1]).swapaxes(1, 2).reshape(weights.shape)


def gguf_name(block: Block, parameter: Parameter) -> str:
    if block.kind == "layer":
        return f"blk.{block.index - 1}.{GGUF_NAMES[parameter.name]}.weight"
    if block.kind == "embed":
        return "token_embd.weight"
    return {"norm.weight": "output_norm.weight", "weight": "output.weight"}[parameter.name]


def write_gguf(
    path: Path, shape: ModelShape, weights: dict[str, np.ndarray], kind: str, **extra: object
) -> None:
    """Matrices in the given encoding, vectors in F32, q and k permuted."""
    writer = gguf.GGUFWriter(path, str(extra.get("architecture", "llama")))
    writer.add_context_length(shape.max_positions)
    writer.add_embedding_length(shape.hidden)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.ffn)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_rope_dimension_count(int(extra.get("rotated", shape.head_dim)))
    writer.add_layer_norm_rms_eps(shape.norm_eps)
    writer.add_rope_freq_base(shape.rope_theta)
    if "scaling" in extra:
        writer.add_string("llama.rope.scaling.type", str(extra["scaling"]))
    quantization = gguf.GGMLQuantizationType[kind]
    for block, parameter in parameters(shape):
        values = weights[hf_name(block, parameter)]
        heads = {"q.weight": shape.heads, "k.weight": shape.kv_heads}.get(parameter.name)
        values = permute(values, heads) if heads else values
        if values.ndim == 1:
            writer.add_tensor(gguf_name(block, parameter), values)
        else:
            stored = gguf.quants.quantize(values, quantization)
            writer.add_tensor(gguf_name(block, parameter), stored, raw_dtype=quantization)
    for name in extra.get("tensors", ()):  # type: ignore[attr-defined]
        writer.add_tensor(name, np.zeros(8, np.float32))
    close(writer)


def prepared(folder: Path, manifest: Manifest) -> Path:
    folder.mkdir(exist_ok=True)
    write_text(folder / MANIFEST, manifest.to_json())
    return folder


def read(source: WeightSource, block: Block, parameter: Parameter, chunk_bytes: int) -> np.ndarray:
    parts, at = [], 0
    for first, chunk in source.chunks(block, parameter, chunk_bytes):
        assert first == at and chunk.dtype == np.float32 and chunk.ndim == 1
        parts.append(chunk.copy())
        at += len(chunk)
    return np.concatenate(parts).reshape(parameter.shape)


@pytest.mark.parametrize("kind", TYPES)
def test_gguf_weights_equal_quantized_ones(kind: str, tmp_path: Path, seed: int) -> None:
    weights = random_weights(SHAPE, seed)
    path = tmp_path / "model.gguf"
    write_gguf(path, SHAPE, weights, kind)
    folder = prepared(tmp_path / "m", gguf_manifest(path))
    quantization = gguf.GGMLQuantizationType[kind]
    with WeightSource.open(folder) as source:
        source.check(SHAPE)
        for block, parameter in parameters(SHAPE):
            expected = weights[hf_name(block, parameter)]
            if expected.ndim == 2:
                # rows are quantized one by one, so their order does not matter
                expected = gguf.quants.dequantize(gguf.quants.quantize(expected, quantization), quantization)
            for chunk_bytes in (1, 3000, 1 << 20):
                found = read(source, block, parameter, chunk_bytes)
                assert np.array_equal(found, expected.reshape(parameter.shape)), (parameter.name, chunk_bytes)


@pytest.mark.parametrize("tied", [True, False])
def test_gguf_config_gives_back_the_shape(tied: bool, tmp_path: Path, seed: int) -> None:
    shape = replace(SHAPE, tied=tied)
    write_gguf(tmp_path / "m.gguf", shape, random_weights(shape, seed), "F32")
    config = gguf_config(read_gguf(tmp_path / "m.gguf"))
    assert ModelShape.from_config(config, "test") == shape


@pytest.mark.parametrize(("extra", "message"), [
    ({"architecture": "mamba"}, "architecture 'mamba'"),
    ({"rotated": 8}, "part of each head"),
    ({"scaling": "dynamic"}, "RoPE scaling 'dynamic'"),
    ({"tensors": ["rope_freqs.weight"]}, "not those of a Llama 3.1"),
])  # fmt: skip
def test_gguf_that_would_compute_something_else_is_refused(
    extra: dict[str, object], message: str, tmp_path: Path
) -> None:
    write_gguf(tmp_path / "m.gguf", SHAPE, random_weights(SHAPE, 0), "F32", **extra)
    with pytest.raises(DataError, match=message):
        gguf_config(read_gguf(tmp_path / "m.gguf"))


@pytest.mark.parametrize("kind", k_quants.BLOCK_BYTES)
def test_k_quants_equal_plain_loops(kind: str, seed: int) -> None:
    raw = k_quants.random_rows(kind, 5, 3, np.random.default_rng(seed))
    decode = decoder(kind)
    assert decode is not None
    found, expected = decode(raw), k_quants.decode(kind, raw)
    assert found.dtype == np.float32 and found.shape == expected.shape
    # the loops round once per value, ggml's arithmetic after every operation
    assert np.abs(found - expected).max() <= 1e-6 * np.abs(expected).max()


def test_gguf_tensor_of_no_llama_is_refused(tmp_path: Path) -> None:
    write_gguf(
        tmp_path / "m.gguf", SHAPE, random_weights(SHAPE, 0), "F32", tensors=["blk.0.attn_sinks.weight"]
    )
    with pytest.raises(DataError, match=r"'blk.0.attn_sinks.weight' belongs to no llama"):
        gguf_manifest(tmp_path / "m.gguf")


def test_biases_of_a_gguf_are_in_its_config(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", SHAPE, random_weights(SHAPE, 0), "F32", tensors=["blk.0.attn_q.bias"])
    config = gguf_config(read_gguf(tmp_path / "m.gguf"))
    assert config["attention_bias"] is True and config["mlp_bias"] is False


def save_folder(
    folder: Path, weights: dict[str, np.ndarray], shards: int, dtype: torch.dtype | None = None
) -> None:
    tensors = {name: torch.from_numpy(value).to(dtype) for name, value in weights.items()}
    folder.mkdir(exist_ok=True)
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return
    names = sorted(tensors)
    index = {}
    for number in range(shards):
        file = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        save_file({name: tensors[name] for name in names[number::shards]}, folder / file)
        index.update(dict.fromkeys(names[number::shards], file))
    write_json(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": index})


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_safetensors_weights_are_read_exactly(
    dtype: torch.dtype, shards: int, tmp_path: Path, seed: int
) -> None:
    stored = random_weights(SHAPE, seed)
    save_folder(tmp_path / "hf", stored, shards, dtype)
    with WeightSource.open(prepared(tmp_path / "m", folder_manifest(tmp_path / "hf"))) as source:
        source.check(SHAPE)
        for block, parameter in parameters(SHAPE):
            expected = torch.from_numpy(stored[hf_name(block, parameter)]).to(dtype).float().numpy()
            for chunk_bytes in (1, 5000, 1 << 20):
                assert np.array_equal(read(source, block, parameter, chunk_bytes), expected)


def change(tensors: dict[str, np.ndarray], name: str, value: np.ndarray | None) -> dict[str, np.ndarray]:
    kept = {key: tensor for key, tensor in tensors.items() if key != name}
    return kept if value is None else {**kept, name: value}


NORM = "model.layers.1.input_layernorm.weight"


@pytest.mark.parametrize(("name", "value", "message"), [
    (NORM, None, f"'{NORM}' is missing"),
    (NORM, np.zeros(63, np.float32), r"shape \[63\], but config.json asks for \[64\]"),
    (NORM, np.zeros(64, np.int32), "stored as I32"),
    ("model.layers.2.input_layernorm.weight", np.zeros(64, np.float32), "is no part of this model"),
    ("lm_head.weight", None, "'lm_head.weight' is missing"),
])  # fmt: skip
def test_weights_that_do_not_fit_are_named(
    name: str, value: np.ndarray | None, message: str, tmp_path: Path
) -> None:
    save_folder(tmp_path / "hf", change(random_weights(SHAPE, 0), name, value), 1)
    folder = prepared(tmp_path / "m", folder_manifest(tmp_path / "hf"))
    with WeightSource.open(folder) as source, pytest.raises(DataError, match=message) as caught:
        source.check(SHAPE)
    assert "model.safetensors" in caught.value.cause and caught.value.hint


def test_tied_model_ignores_a_stored_copy_of_its_embedding(tmp_path: Path) -> None:
    save_folder(tmp_path / "hf", random_weights(SHAPE, 0), 1)
    with WeightSource.open(prepared(tmp_path / "m", folder_manifest(tmp_path / "hf"))) as source:
        source.check(replace(SHAPE, tied=True))


@pytest.mark.parametrize("form", ["gguf", "safetensors"])
def test_truncated_file_is_found_before_and_after_preparing(form: str, tmp_path: Path) -> None:
    weights = random_weights(SHAPE, 0)
    make: Callable[[], Manifest]
    if form == "gguf":
        path = tmp_path / "m.gguf"
        write_gguf(path, SHAPE, weights, "F32")
        make = lambda: gguf_manifest(path)  # noqa: E731
    else:
        save_folder(tmp_path / "hf", weights, 1)
        path = tmp_path / "hf" / "model.safetensors"
        make = lambda: folder_manifest(path.parent)  # noqa: E731
    folder = prepared(tmp_path / "p", make())
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(DataError, match=r"has \d+ bytes; it had"):
        WeightSource.open(folder)
    with pytest.raises(DataError, match=r"tensor.*ends at"):
        make()


def test_every_cut_of_a_header_is_an_error_of_ours(tmp_path: Path, seed: int) -> None:
    weights = random_weights(SHAPE, seed)
    write_gguf(tmp_path / "m.gguf", SHAPE, weights, "F32")
    save_folder(tmp_path / "hf", weights, 1)
    whole = {"m.gguf": (tmp_path / "m.gguf").read_bytes()}
    whole["model.safetensors"] = (tmp_path / "hf" / "model.safetensors").read_bytes()
    rng = np.random.default_rng(seed)
    (tmp_path / "cut").mkdir()
    for name, data in whole.items():
        path = tmp_path / "cut" / name
        for at in rng.integers(0, 2500, 60).tolist():
            path.write_bytes(data[:at])
            with pytest.raises(DataError):
                gguf_manifest(path) if name.endswith("gguf") else folder_manifest(path.parent)


def test_damaged_header_bytes_never_escape_as_other_errors(tmp_path: Path, seed: int) -> None:
    write_gguf(tmp_path / "m.gguf", SHAPE, random_weights(SHAPE, seed), "F32")
    data = bytearray((tmp_path / "m.gguf").read_bytes())
    rng = np.random.default_rng(seed)
    refused = 0
    for _ in range(300):
        damaged = bytearray(data)
        damaged[int(rng.integers(0, 1500))] ^= int(rng.integers(1, 256))
        (tmp_path / "d.gguf").write_bytes(damaged)
        try:
            header = read_gguf(tmp_path / "d.gguf")
            gguf_config(header)
            gguf_manifest(tmp_path / "d.gguf")
        except DataError:
            refused += 1
    assert refused > 30


@pytest.mark.parametrize("value", [0, -3, "four", 2.0, True])
def test_metadata_that_is_no_count_is_refused(value: object, tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", SHAPE, random_weights(SHAPE, 0), "F32")
    header = read_gguf(tmp_path / "m.gguf")
    header.metadata["llama.attention.head_count"] = value
    with pytest.raises(DataError, match=r"head_count' is .*not a positive integer"):
        gguf_config(header)


def test_index_that_points_outside_its_folder_is_refused(tmp_path: Path) -> None:
    save_folder(tmp_path, random_weights(SHAPE, 0), 2)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    index["weight_map"][NORM] = "../other.safetensors"
    write_json(tmp_path / "model.safetensors.index.json", index)
    with pytest.raises(DataError, match="outside the folder"):
        folder_manifest(tmp_path)


def test_unknown_manifest_key_is_refused(tmp_path: Path) -> None:
    data = json.loads(random_manifest({}, 1).to_json())
    write_json(tmp_path / MANIFEST, {**data, "sede": 3})
    with pytest.raises(ConfigError, match="sede"):
        WeightSource.open(tmp_path)


def test_random_weights_do_not_depend_on_chunks_and_are_normal(tmp_path: Path, seed: int) -> None:
    shape = replace(SHAPE, vocab=5000)
    manifest = random_manifest({"initializer_range": 0.05}, seed)
    with WeightSource.open(prepared(tmp_path / "m", manifest)) as source:
        source.check(shape)
        drawn = {hf_name(b, p): read(source, b, p, 1) for b, p in parameters(shape)}
        for block, parameter in parameters(shape):
            assert np.array_equal(read(source, block, parameter, 1 << 20), drawn[hf_name(block, parameter)])
    embedding = drawn["model.embed_tokens.weight"]
    # deviation of the mean and of the deviation, five sigma
    assert abs(embedding.mean()) < 5 * 0.05 / embedding.size**0.5
    assert abs(embedding.std() / 0.05 - 1) < 5 / (2 * embedding.size) ** 0.5
    assert (
        np.abs(embedding.reshape(-1)[: 1 << 16] @ embedding.reshape(-1)[1 << 16 : 1 << 17])
        < 5 * 0.05**2 * 256
    )
    assert all((value == 1).all() for name, value in drawn.items() if "norm" in name)
    matrices = [value.tobytes()[:64] for name, value in drawn.items() if "norm" not in name]
    assert len(set(matrices)) == len(matrices)
    with WeightSource.open(prepared(tmp_path / "n", random_manifest({}, seed + 1))) as other:
        block, parameter = parameters(shape)[0]
        assert not np.array_equal(read(other, block, parameter, 1) * np.float32(2.5), embedding)
