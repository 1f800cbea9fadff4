"""Exports load elsewhere with the same numbers, appear whole or not at all, and stay small in memory."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from packmule.errors import DiskError
from packmule.models.weights.decode import to_bfloat16
from packmule.models.weights.export import ExportDtype, export_bytes, write_huggingface
from packmule.models.weights.names import hf_name
from packmule.shapes.model import Block, ModelShape, Parameter

CONFIG = {
    "model_type": "llama", "vocab_size": 96, "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 5e5, "max_position_embeddings": 128,
    "tie_word_embeddings": False, "attention_bias": False, "mlp_bias": False,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
SHAPE = ModelShape.from_config(CONFIG, "test")


class Weights:
    """Random weights by Hugging Face name, given out in uneven chunks."""

    def __init__(self, shape: ModelShape, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.by_name = {
            hf_name(b, p): rng.standard_normal(p.shape, np.float32) * np.float32(0.2)
            for b in shape.blocks()
            for p in b.parameters
        }

    def __call__(self, block: Block, parameter: Parameter) -> Iterator[np.ndarray]:
        flat = self.by_name[hf_name(block, parameter)].reshape(-1)
        for at in range(0, len(flat), 777):
            yield flat[at : at + 777]


def test_bfloat16_rounds_to_nearest_even_like_torch(seed: int) -> None:
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(seed)
    bits = rng.integers(0, 1 << 32, 200_000, np.uint32)
    edges = (np.arange(1 << 16, dtype=np.uint32) << np.uint32(16)) | np.uint32(0x8000)
    values = np.concatenate([bits, edges]).view(np.float32)
    found = torch.from_numpy(to_bfloat16(values).view(np.int16)).view(torch.bfloat16)
    expected = torch.from_numpy(values).to(torch.bfloat16)
    number = ~torch.isnan(expected)
    assert torch.equal(torch.isnan(found), ~number)
    assert torch.equal(found[number].view(torch.int16), expected[number].view(torch.int16))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(("tied", "shard_bytes"), [(False, 1 << 40), (True, 1 << 40), (False, 60_000)])
def test_transformers_loads_the_export_with_equal_logits(
    dtype: ExportDtype, tied: bool, shard_bytes: int, tmp_path: Path, seed: int
) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    shape, config = replace(SHAPE, tied=tied), {**CONFIG, "tie_word_embeddings": tied}
    weights = Weights(shape, seed)
    write_huggingface(tmp_path / "out", shape, config, weights, dtype, shard_bytes=shard_bytes)
    shards = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert len(shards) > 2 if shard_bytes == 60_000 else shards == ["model.safetensors"]
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.dtype == getattr(torch, dtype)
    reference = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config)).eval()
    state = {name: torch.from_numpy(value) for name, value in weights.by_name.items()}
    missing, unexpected = reference.load_state_dict(state, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}
    for parameter in reference.parameters():
        # Module.to would also round the RoPE frequencies, which from_pretrained keeps in fp32
        parameter.data = parameter.data.to(getattr(torch, dtype))
    ids = torch.randint(0, 96, (2, 17), generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        assert torch.equal(model.eval()(ids).logits, reference(ids).logits)


def test_safetensors_library_reads_the_export(tmp_path: Path, seed: int) -> None:
    from safetensors.numpy import load_file

    weights = Weights(SHAPE, seed)
    write_huggingface(tmp_path / "out", SHAPE, CONFIG, weights, "float32")
    loaded = load_file(tmp_path / "out" / "model.safetensors")
    assert loaded.keys() == weights.by_name.keys()
    assert all(np.array_equal(loaded[name], value) for name, value in weights.by_name.items())
    assert sum(value.nbytes for value in loaded.values()) == export_bytes(SHAPE, "float32")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"] and config["torch_dtype"] == "float32"
    assert {key: config[key] for key in CONFIG} == CONFIG


def test_tokenizer_files_are_copied(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "weights.json"):
        (model / name).write_text(f'{{"{name}": 1}}')
    write_huggingface(tmp_path / "out", SHAPE, CONFIG, Weights(SHAPE, 0), "bfloat16", model)
    names = {path.name for path in (tmp_path / "out").iterdir()}
    copied = {"tokenizer.json", "tokenizer_config.json", "generation_config.json"}
    assert names == copied | {"model.safetensors", "config.json"}
    assert all((tmp_path / "out" / name).read_text() == (model / name).read_text() for name in copied)


def test_failed_export_leaves_the_old_folder(tmp_path: Path) -> None:
    write_huggingface(tmp_path / "out", SHAPE, CONFIG, Weights(SHAPE, 1), "bfloat16")
    before = (tmp_path / "out" / "model.safetensors").read_bytes()

    def short(block: Block, parameter: Parameter) -> Iterator[np.ndarray]:
        yield np.zeros(3, np.float32)

    with pytest.raises(ValueError, match="elements given"):
        write_huggingface(tmp_path / "out", SHAPE, CONFIG, short, "bfloat16")
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limit[1]))
    try:
        with pytest.raises(DiskError, match="cannot write"):
            write_huggingface(tmp_path / "out", SHAPE, CONFIG, Weights(SHAPE, 2), "bfloat16")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == before
    write_huggingface(tmp_path / "out", SHAPE, CONFIG, Weights(SHAPE, 2), "bfloat16")
    assert (tmp_path / "out" / "model.safetensors").read_bytes() != before


MEASURE = """
import json, sys
from pathlib import Path
from packmule.data.files import write_text
from packmule.data.manifest import random_manifest
from packmule.data.prepare import peak_ram_bytes
from packmule.models.weights.export import write_huggingface
from packmule.models.weights.source import WeightSource
from packmule.shapes.model import ModelShape
out, config = Path(sys.argv[1]), json.loads(sys.argv[2])
shape = ModelShape.from_config(config, "test")
write_text(out / "weights.json", random_manifest(config, 1).to_json())
with WeightSource.open(out) as source:
    tensors = lambda block, parameter: (c for _, c in source.chunks(block, parameter, 1 << 20))
    write_huggingface(out / "final", shape, config, tensors, "bfloat16")
print(peak_ram_bytes(), "torch" in sys.modules)
"""


def test_memory_does_not_grow_with_the_model_and_torch_stays_out(tmp_path: Path) -> None:
    peaks = []
    for vocab in (96, 60_000):
        folder = tmp_path / str(vocab)
        folder.mkdir()
        config = json.dumps({**CONFIG, "vocab_size": vocab, "hidden_size": 256})
        command = [sys.executable, "-c", MEASURE, str(folder), config]
        peak, torch = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
        assert torch == "False"
        peaks.append(int(peak))
    print(f"peaks: {peaks}")
    # the larger model has two matrices of 61 MB in fp32
    assert peaks[1] - peaks[0] < 16 << 20
