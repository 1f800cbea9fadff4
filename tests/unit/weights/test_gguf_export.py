"""A .gguf file holds the rounded weights, loads elsewhere, and appears whole or not at all."""

from __future__ import annotations

import json
import random
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import gguf
import numpy as np
import pytest
from tests.unit.data.samples import CORPUS, random_text
from tests.unit.weights.test_export import CONFIG, Weights
from tests.unit.weights.test_source import parameters, prepared, read

from packmule.data.files import write_json
from packmule.data.gguf import read_gguf
from packmule.data.gguf_config import gguf_config
from packmule.data.gguf_tokenizer import tokenizer_from_gguf
from packmule.data.manifest import gguf_manifest
from packmule.data.tokenizer import TextTokenizer
from packmule.errors import ConfigError, DataError, DiskError
from packmule.models.weights.gguf_export import GgufDtype, gguf_bytes, write_gguf
from packmule.models.weights.names import hf_name
from packmule.models.weights.source import WeightSource
from packmule.shapes.model import Block, ModelShape, Parameter

DTYPES: tuple[GgufDtype, ...] = get_args(GgufDtype)
VOCAB = 440  # 20 more rows than the tokenizer has tokens
ODD = {"hidden_size": 48, "head_dim": 12, "intermediate_size": 80}
"""Rows that do not divide into groups of 32."""


@pytest.fixture
def folder(byte_level: Callable[..., Path], tmp_path: Path) -> Path:
    """A model folder with a tokenizer and a chat template, but no weights."""
    path = tmp_path / "model"
    path.mkdir()
    tokenizer_from_gguf(byte_level("smollm", add_bos=True)).save(path)
    return path


def config_of(**changes: Any) -> dict[str, Any]:
    return {**CONFIG, "vocab_size": VOCAB, **changes}


def shape_of(config: dict[str, Any]) -> ModelShape:
    return ModelShape.from_config(config, "test")


def rounded(values: np.ndarray, name: str, dtype: str) -> np.ndarray:
    """What the file must hold, by gguf's own quantizer; rows are rounded one by one, whatever their order."""
    if values.ndim == 1:
        return values
    kind = gguf.GGMLQuantizationType["F16" if dtype == "Q8_0" and values.shape[-1] % 32 else dtype]
    stored = gguf.quants.quantize(values, kind)
    return gguf.quants.dequantize(stored, kind).reshape(values.shape)


@pytest.mark.parametrize("sizes", [{}, ODD], ids=["groups", "odd"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_export_read_back_gives_the_rounded_weights(
    dtype: GgufDtype, tied: bool, sizes: dict[str, int], folder: Path, tmp_path: Path, seed: int
) -> None:
    config = config_of(tie_word_embeddings=tied, **sizes)
    shape = shape_of(config)
    weights = Weights(shape, seed)
    path = tmp_path / "out.gguf"
    write_gguf(path, shape, config, weights, dtype, folder)
    found = gguf_config(read_gguf(path))
    assert ModelShape.from_config(found, "test") == shape
    assert {key: found[key] for key in ("bos_token_id", "eos_token_id")} == {
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    with WeightSource.open(prepared(tmp_path / "m", gguf_manifest(path))) as source:
        source.check(shape)
        for block, parameter in parameters(shape):
            name = hf_name(block, parameter)
            expected = rounded(weights.by_name[name], name, dtype)
            assert np.array_equal(read(source, block, parameter, 3000), expected), name
    reader = gguf.GGUFReader(path)
    assert sum(-(-tensor.n_bytes // 32) * 32 for tensor in reader.tensors) == gguf_bytes(shape, config, dtype)


def test_tokenizer_and_template_come_back(folder: Path, tmp_path: Path, seed: int) -> None:
    config = config_of()
    write_gguf(tmp_path / "out.gguf", shape_of(config), config, Weights(shape_of(config), 0), "F16", folder)
    before, after = TextTokenizer.from_folder(folder), tokenizer_from_gguf(tmp_path / "out.gguf")
    rng = random.Random(seed)
    texts = [*CORPUS, *(random_text(rng, 30) for _ in range(40))]
    assert after.encode(texts) == before.encode(texts)
    fields = ("bos", "eos", "pad", "add_bos")
    assert [getattr(after, f) for f in fields] == [getattr(before, f) for f in fields]
    assert after.config["chat_template"] == before.config["chat_template"] == "{{ messages }}"
    assert after.vocab == VOCAB  # rows without a token have a name of their own


def test_template_file_goes_before_that_of_the_config(folder: Path, tmp_path: Path) -> None:
    (folder / "chat_template.jinja").write_text("{{ newer }}")
    config = config_of()
    write_gguf(tmp_path / "out.gguf", shape_of(config), config, Weights(shape_of(config), 0), "F16", folder)
    assert read_gguf(tmp_path / "out.gguf").metadata["tokenizer.chat_template"] == "{{ newer }}"


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_transformers_loads_the_file_with_equal_logits(
    dtype: GgufDtype, tied: bool, folder: Path, tmp_path: Path, seed: int
) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = config_of(tie_word_embeddings=tied)
    shape = shape_of(config)
    weights = Weights(shape, seed)
    write_gguf(tmp_path / "out.gguf", shape, config, weights, dtype, folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="out.gguf", dtype=torch.float32
    )
    reference = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config)).eval()
    state = {name: torch.from_numpy(rounded(value, name, dtype)) for name, value in weights.by_name.items()}
    missing, unexpected = reference.load_state_dict(state, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}
    ids = torch.randint(0, VOCAB, (2, 17), generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        assert torch.equal(model.eval()(ids).logits, reference(ids).logits)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file="out.gguf")
    ours = TextTokenizer.from_folder(folder)
    for text, expected in zip(CORPUS, ours.encode(CORPUS), strict=True):
        # transformers' own reading knows no digits that stand alone
        if not any(character.isdigit() for character in text):
            assert theirs(text, add_special_tokens=False).input_ids == expected


def test_value_beyond_float16_is_refused_and_leaves_no_file(folder: Path, tmp_path: Path) -> None:
    config = config_of()
    shape = shape_of(config)
    weights = Weights(shape, 0)
    weights.by_name["model.layers.1.mlp.down_proj.weight"][3, 5] = 7e4
    with pytest.raises(DataError, match=r"blk\.1\.ffn_down\.weight has values beyond float16"):
        write_gguf(tmp_path / "out.gguf", shape, config, weights, "F16", folder)
    assert not list(tmp_path.glob("out*"))
    write_gguf(tmp_path / "out.gguf", shape, config, weights, "BF16", folder)


def test_failed_export_leaves_the_old_file(folder: Path, tmp_path: Path) -> None:
    config = config_of()
    shape, path = shape_of(config), tmp_path / "out.gguf"
    write_gguf(path, shape, config, Weights(shape, 1), "F16", folder)
    before = path.read_bytes()

    def short(block: Block, parameter: Parameter) -> Iterator[np.ndarray]:
        yield np.zeros(shape.hidden, np.float32)

    with pytest.raises(ValueError, match="elements given"):
        write_gguf(path, shape, config, short, "F16", folder)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, limit[1]))
    try:
        with pytest.raises(DiskError, match="cannot write"):
            write_gguf(path, shape, config, Weights(shape, 2), "F16", folder)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert [found.name for found in tmp_path.glob("out*")] == ["out.gguf"]
    assert path.read_bytes() == before
    write_gguf(path, shape, config, Weights(shape, 2), "F16", folder)
    assert path.read_bytes() != before


def test_family_without_gguf_files_is_refused(folder: Path, tmp_path: Path) -> None:
    config = config_of()
    shape = shape_of(config)
    with pytest.raises(ConfigError, match="'mamba' models are not written"):
        write_gguf(
            tmp_path / "out.gguf", shape, {**config, "model_type": "mamba"}, Weights(shape, 0), "F16", folder
        )


MEASURE = """
import json, sys
from pathlib import Path
from packmule.data.files import write_text
from packmule.data.manifest import random_manifest
from packmule.data.prepare import peak_ram_bytes
from packmule.models.weights.gguf_export import write_gguf
from packmule.models.weights.source import WeightSource
from packmule.shapes.model import ModelShape
out, model, config = Path(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3])
shape = ModelShape.from_config(config, "test")
write_text(out / "weights.json", random_manifest(config, 1).to_json())
with WeightSource.open(out) as source:
    tensors = lambda block, parameter: (c for _, c in source.chunks(block, parameter, 1 << 20))
    write_gguf(out / "final.gguf", shape, config, tensors, sys.argv[4], model)
print(peak_ram_bytes(), "torch" in sys.modules)
"""


def test_memory_does_not_grow_with_the_model_and_torch_stays_out(folder: Path, tmp_path: Path) -> None:
    peaks = []
    for width in (96, 24_000):
        out = tmp_path / str(width)
        out.mkdir()
        config = json.dumps(config_of(hidden_size=256, intermediate_size=width, num_hidden_layers=1))
        command = [sys.executable, "-c", MEASURE, str(out), str(folder), config, "Q8_0"]
        peak, torch = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
        assert torch == "False"
        peaks.append(int(peak))
    print(f"peaks: {peaks}")
    # the larger model has three matrices of 25 MB in fp32
    assert peaks[1] - peaks[0] < 16 << 20


def test_config_json_is_not_needed_beside_the_file(folder: Path, tmp_path: Path) -> None:
    config = config_of()
    write_json(folder / "config.json", config)
    shape = shape_of(config)
    write_gguf(tmp_path / "out.gguf", shape, config, Weights(shape, 0), "F32", folder)
    header = read_gguf(tmp_path / "out.gguf")
    assert header.metadata["general.architecture"] == "llama" and header.metadata["general.file_type"] == 0
    assert header.metadata["llama.rope.freq_base"] == 5e5
