"""Weight files as nobody should write them: no traceback, no hang, no large allocation."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from malformed import ODD_VALUES, examples, outcome, spoiled, twisted
from safetensors.numpy import save

from packmule.data.files import read_json
from packmule.data.gguf import read_gguf
from packmule.data.gguf_config import gguf_config
from packmule.data.gguf_tokenizer import tokenizer_from_gguf
from packmule.data.manifest import Manifest, folder_manifest, gguf_manifest
from packmule.data.safetensors import read_safetensors
from packmule.data.tokenizer import TextTokenizer
from packmule.models.weights.names import hf_name
from packmule.models.weights.source import FileSource, WeightSource
from packmule.shapes.model import ModelShape

CONFIG = {
    "model_type": "llama", "vocab_size": 40, "hidden_size": 32, "intermediate_size": 32,
    "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
    "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "max_position_embeddings": 64, "tie_word_embeddings": True,
}  # fmt: skip
SHAPE = ModelShape.from_config(CONFIG, "test")


def weights() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(3)
    return {
        hf_name(b, p): rng.standard_normal(p.shape, np.float32) for b in SHAPE.blocks() for p in b.parameters
    }


def read_all(manifest: Manifest) -> None:
    """What a run does with a manifest: open, check, read every parameter."""
    with FileSource(manifest) as source:
        source.check(SHAPE)
        for block in SHAPE.blocks():
            for parameter in block.parameters:
                for _ in source.chunks(block, parameter, 1 << 12):
                    pass


# safetensors


def safetensors_file(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def one(dtype: Any = "F32", shape: Any = (4,), offsets: Any = (0, 16)) -> dict[str, Any]:
    return {"a": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}


D16 = bytes(16)


def raw(entries: str, shape: str = "4", dtype: str = '"dtype":"F32"', data: bytes = D16) -> bytes:
    """A header as text: `ENTRY` in `entries` is a tensor's, with this shape and dtype."""
    entry = f'{{{dtype},"shape":[{shape}],"data_offsets":[0,16]}}'
    return safetensors_file(entries.replace("ENTRY", entry).encode(), data)


def two(offsets: tuple[int, int], length: int, first: int = 4) -> bytes:
    """Tensors a at 0 to `first` and b at `offsets`."""
    b = {"dtype": "F32", "shape": [(offsets[1] - offsets[0]) // 4], "data_offsets": offsets}
    return safetensors_file({**one(shape=[first // 4], offsets=[0, first]), "b": b}, bytes(length))


SAFETENSORS = {
    "empty": b"",
    "seven bytes": b"1234567",
    "only a length": (5).to_bytes(8, "little"),
    "header of 2^60 bytes": safetensors_file(one(), D16, 2**60),
    "header of 2^64 - 1 bytes": safetensors_file(one(), D16, 2**64 - 1),
    "header of 100 MB in a small file": safetensors_file(one(), D16, 100_000_000),
    "header one byte too long": safetensors_file(one(), b"", len(json.dumps(one())) + 1),
    "no JSON": safetensors_file(b"hello world"),
    "not UTF-8": safetensors_file(b'{"\xff\xfe": {}}'),
    "deep lists": safetensors_file(b"[" * 200_000),
    "deep objects": safetensors_file(b'{"a":' * 100_000 + b"1" + b"}" * 100_000),
    "a list": safetensors_file([]),
    "a number": safetensors_file(b"5"),
    "null": safetensors_file(b"null"),
    "a thousand digits": raw('{"a":ENTRY}', "9" * 1000),
    "five thousand digits": raw('{"a":ENTRY}', "9" * 5000),
    "many values": safetensors_file(b'{"a":[' + b"[]," * 1_100_000 + b"[]]}"),
    "same name twice": raw('{"a":ENTRY,"a":ENTRY}'),
    "same key twice": raw('{"a":ENTRY}', dtype='"dtype":"F32","dtype":"F16"'),
    "unknown dtype": safetensors_file(one("F31"), D16),
    "dtype of another case": safetensors_file(one("f32"), D16),
    "dtype null": safetensors_file(one(None), D16),
    "dtype a list": safetensors_file(one(["F32"]), D16),
    "NaN in the shape": safetensors_file(one(shape=[float("nan")]), D16),
    "Infinity in the shape": safetensors_file(one(shape=[float("inf")]), D16),
    "minus Infinity as an offset": safetensors_file(one(offsets=[float("-inf"), 16]), D16),
    "fraction in the shape": safetensors_file(one(shape=[4.0]), D16),
    "string in the shape": safetensors_file(one(shape=["4"]), D16),
    "true in the shape": safetensors_file(one(shape=[True, 4]), D16),
    "null in the shape": safetensors_file(one(shape=[None]), D16),
    "shape a number": safetensors_file(one(shape=4), D16),
    "shape null": safetensors_file(one(shape=None), D16),
    "shape an object": safetensors_file(one(shape={"0": 4}), D16),
    "negative shape": safetensors_file(one(shape=[-4]), D16),
    "two negative dimensions": safetensors_file(one(shape=[-2, -2]), D16),
    "shape of 2^62": safetensors_file(one(shape=[2**62, 4]), D16),
    "shape whose product is 2^64": safetensors_file(one(shape=[2**32, 2**32]), D16),
    "shape times zero": safetensors_file(one(shape=[2**62, 0], offsets=[0, 0])),
    "thousand dimensions": safetensors_file(one(shape=[1] * 1000 + [4]), D16),
    "one offset": safetensors_file(one(offsets=[0]), D16),
    "three offsets": safetensors_file(one(offsets=[0, 8, 16]), D16),
    "no offsets": safetensors_file({"a": {"dtype": "F32", "shape": [4]}}, D16),
    "offsets backwards": safetensors_file(one(offsets=[16, 0]), D16),
    "negative offset": safetensors_file(one(offsets=[-16, 0]), D16),
    "offset of 2^63": safetensors_file(one(offsets=[2**63, 2**63 + 16]), D16),
    "offset of 2^200": safetensors_file(one(offsets=[2**200, 2**200 + 16]), D16),
    "end beyond the file": safetensors_file(one(shape=[8], offsets=[0, 32]), D16),
    "bytes that belong to no tensor": safetensors_file(one(), bytes(20)),
    "hole between tensors": two((8, 12), 12),
    "tensors overlap": two((4, 12), 12, first=8),
    "two tensors at one place": safetensors_file({**one(), "b": one()["a"]}, D16),
    "entry a list": safetensors_file({"a": []}),
    "entry a string": safetensors_file({"a": "F32"}),
    "entry null": safetensors_file({"a": None}),
    "name of a megabyte": raw('{"%s":ENTRY}' % ("n" * (1 << 20)), dtype='"dtype":"F31"'),
    "name of half a surrogate": raw('{"\\ud800":ENTRY}', dtype='"dtype":"F31"'),
    "name with line breaks": raw(r'{"a\nerror: b\u001b[2J":ENTRY}', dtype='"dtype":"?"'),
}  # fmt: skip


@pytest.mark.parametrize("case", SAFETENSORS)
def test_malformed_safetensors_is_refused(case: str, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(SAFETENSORS[case])
    cause = outcome(lambda: read_all(folder_manifest(tmp_path)))
    assert cause != "read" and "model.safetensors" in cause and "\n" not in cause


@pytest.mark.parametrize("case", SAFETENSORS)
def test_the_safetensors_library_agrees_that_it_is_malformed(case: str) -> None:
    from safetensors import SafetensorError
    from safetensors.numpy import load

    # its own answers to these differ from the format's text or from ours by intent
    if case in ("same name twice", "same key twice", "thousand dimensions", "many values"):
        return
    with pytest.raises((SafetensorError, KeyError, ValueError, TypeError, OverflowError)):
        if load(SAFETENSORS[case]) is not None and case == "shape times zero":
            raise ValueError("a tensor without elements")


def test_damaged_safetensors_headers_end_in_errors_of_ours(tmp_path: Path, seed: int, long: bool) -> None:
    path = tmp_path / "model.safetensors"
    data = save(weights())
    header = 8 + int.from_bytes(data[:8], "little")

    def check(case: bytes) -> None:
        path.write_bytes(case)
        outcome(lambda: read_all(folder_manifest(tmp_path)))

    examples(spoiled(data, header), check, 3000 if long else 100, seed)


def test_twisted_safetensors_headers_end_in_errors_of_ours(tmp_path: Path, seed: int, long: bool) -> None:
    path = tmp_path / "model.safetensors"
    data = save(weights())
    length = int.from_bytes(data[:8], "little")
    header, body = json.loads(data[8 : 8 + length]), data[8 + length :]

    def check(case: Any) -> None:
        path.write_bytes(safetensors_file(case, body))
        outcome(lambda: read_all(folder_manifest(tmp_path)))

    examples(twisted(header), check, 3000 if long else 100, seed)


def test_twisted_indexes_and_configs_end_in_errors_of_ours(tmp_path: Path, seed: int, long: bool) -> None:
    tensors = weights()
    names = sorted(tensors)
    (tmp_path / "a.safetensors").write_bytes(save({name: tensors[name] for name in names[::2]}))
    (tmp_path / "b.safetensors").write_bytes(save({name: tensors[name] for name in names[1::2]}))
    index = tmp_path / "model.safetensors.index.json"
    good = {
        "metadata": {"total_size": 1},
        "weight_map": {name: "ab"[i % 2] + ".safetensors" for i, name in enumerate(names)},
    }
    index.write_text(json.dumps(good))
    assert outcome(lambda: read_all(folder_manifest(tmp_path))) == "read"

    def check(case: Any) -> None:
        index.write_text(json.dumps(case))
        outcome(lambda: read_all(folder_manifest(tmp_path)))

    examples(twisted(good), check, 1000 if long else 50, seed)


# GGUF


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def pair(key: str | bytes, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def info(name: str | bytes = "t", shape: tuple[int, ...] = (8,), kind: int = 0, offset: int = 0) -> bytes:
    return (
        text(name)
        + struct.pack("<I", len(shape))
        + b"".join(struct.pack("<Q", n) for n in shape)
        + struct.pack("<IQ", kind, offset)
    )


def gguf_file(
    pairs: tuple[bytes, ...] = (), infos: tuple[bytes, ...] = (), data: bytes = bytes(64),
    magic: bytes = b"GGUF", version: int = 3, keys: int | None = None, tensors: int | None = None,
) -> bytes:  # fmt: skip
    head = magic + struct.pack(
        "<IQQ", version, len(infos) if tensors is None else tensors, len(pairs) if keys is None else keys
    )
    head += b"".join(pairs) + b"".join(infos)
    return head + bytes(-len(head) % 32) + data


def array(kind: int, count: int, value: bytes = b"") -> bytes:
    return struct.pack("<IQ", kind, count) + value


LLAMA = pair("general.architecture", 8, text("llama"))
EMBEDDING = info("token_embd.weight", (8, 1))
LONG = array(8, 1, struct.pack("<Q", 2**61))
GGUF = {
    "empty": b"",
    "three bytes": b"GGU",
    "wrong magic": gguf_file(magic=b"GGML"),
    "magic backwards": gguf_file(magic=b"FUGG"),
    "a zip file": b"PK\x03\x04" + bytes(100),
    "version 1": gguf_file(version=1),
    "version 4": gguf_file(version=4),
    "version of another byte order": gguf_file(version=3 << 24),
    "2^60 tensors": gguf_file(tensors=2**60),
    "2^64 - 1 tensors": gguf_file(tensors=2**64 - 1),
    "a million tensors": gguf_file(tensors=1_000_000),
    "2^60 keys": gguf_file(keys=2**60),
    "fifty thousand keys": gguf_file(keys=50_000),
    "ends after the magic": b"GGUF",
    "ends in the counts": gguf_file()[:20],
    "key of 2^60 bytes": gguf_file((struct.pack("<Q", 2**60) + b"abc",)),
    "key of 2^63 bytes": gguf_file((struct.pack("<Q", 2**63) + b"abc",)),
    "key not UTF-8": gguf_file((pair(b"\xff\xfe", 4, bytes(4)),)),
    "value of unknown type": gguf_file((pair("a", 13, bytes(8)),)),
    "value of type 2^32 - 1": gguf_file((pair("a", 2**32 - 1, bytes(8)),)),
    "string of 2^60 bytes": gguf_file((pair("a", 8, struct.pack("<Q", 2**60)),)),
    "string beyond the file": gguf_file((pair("a", 8, struct.pack("<Q", 500)),)),
    "string not UTF-8": gguf_file((pair("general.architecture", 8, text(b"\xc3\x28")),)),
    "array of 2^60 strings": gguf_file((pair("tokenizer.ggml.tokens", 9, array(8, 2**60)),)),
    "array of 2^60 floats": gguf_file((pair("tokenizer.ggml.scores", 9, array(6, 2**60)),)),
    "array of 2^62 bytes nobody wants": gguf_file((pair("a", 9, array(0, 2**62)),)),
    "array of four million strings": gguf_file((pair("tokenizer.ggml.tokens", 9, array(8, 1 << 22)),)),
    "array of arrays": gguf_file((pair("a", 9, array(9, 1, array(0, 1, b"x"))),)),
    "array of unknown type": gguf_file((pair("a", 9, array(77, 1)),)),
    "array whose string is too long": gguf_file((pair("tokenizer.ggml.tokens", 9, LONG),)),
    "skipped array whose string is too long": gguf_file((pair("a", 9, LONG),)),
    "same key twice": gguf_file((pair("a", 4, bytes(4)), pair("a", 4, bytes(4)))),
    "part of several files": gguf_file((pair("split.count", 2, struct.pack("<H", 3)),)),
    "split count a string": gguf_file((pair("split.count", 8, text("many" * 100)),)),
    "alignment 0": gguf_file((pair("general.alignment", 4, bytes(4)),), (info(),)),
    "alignment 2^63": gguf_file((pair("general.alignment", 10, struct.pack("<Q", 2**63)),), (info(),)),
    "alignment a string": gguf_file((pair("general.alignment", 8, text("32")),), (info(),)),
    "alignment NaN": gguf_file((pair("general.alignment", 6, struct.pack("<f", float("nan"))),), (info(),)),
    "tensor of 5 dimensions": gguf_file((LLAMA,), (info(shape=(1, 1, 1, 1, 8)),)),
    "tensor of 2^32 - 1 dimensions": gguf_file((LLAMA,), (text("t") + struct.pack("<I", 2**32 - 1),)),
    "tensor of unknown type": gguf_file((LLAMA,), (info(kind=99),)),
    "tensor of a removed type": gguf_file((LLAMA,), (info(kind=4),)),
    "tensor of type 2^32 - 1": gguf_file((LLAMA,), (info(kind=2**32 - 1),)),
    "tensor without elements": gguf_file((LLAMA,), (info(shape=(0,)),)),
    "tensor of zero rows of 2^60": gguf_file((LLAMA,), (info(shape=(2**60, 0)),)),
    "tensor of 2^60 elements": gguf_file((LLAMA,), (info(shape=(2**60,)),)),
    "tensor of 2^256 elements": gguf_file((LLAMA,), (info(shape=(2**63,) * 4),)),
    "tensor whose bytes wrap around": gguf_file((LLAMA,), (info(shape=(2**62, 4)),)),
    "rows that do not fit their groups": gguf_file((LLAMA,), (info(shape=(8,), kind=8),)),
    "offset beyond the file": gguf_file((LLAMA,), (info(offset=4096),)),
    "offset of 2^63": gguf_file((LLAMA,), (info(offset=2**63),)),
    "same tensor twice": gguf_file((LLAMA,), (info(), info(offset=32))),
    "tensors overlap": gguf_file((LLAMA,), (info("a"), info("b", offset=16))),
    "name of 2^60 bytes": gguf_file((LLAMA,), (struct.pack("<Q", 2**60) + b"t",)),
    "name not UTF-8": gguf_file((LLAMA,), (info(b"\x80"),)),
    "no architecture": gguf_file((), (info(),)),
    "architecture a number": gguf_file((pair("general.architecture", 4, bytes(4)),), (EMBEDDING,)),
    "architecture unknown": gguf_file((pair("general.architecture", 8, text("x" * 2000)),), (EMBEDDING,)),
    "no embedding": gguf_file((LLAMA,), (info(),)),
    "embedding of one dimension": gguf_file((LLAMA,), (info("token_embd.weight"),)),
    "no settings": gguf_file((LLAMA,), (EMBEDDING,)),
}  # fmt: skip

ARRAYS = tuple(f"tokenizer.ggml.{name}" for name in ("tokens", "merges", "scores", "token_type"))


def read_gguf_file(path: Path) -> None:
    """Everything a run does with a .gguf file."""
    config = gguf_config(read_gguf(path, ARRAYS))
    shape = ModelShape.from_config(config, str(path))
    manifest = gguf_manifest(path)
    tokenizer_from_gguf(path).encode(["The mule, 123"])
    with FileSource(manifest) as source:
        source.check(shape)
    read_all(manifest)


@pytest.mark.parametrize("case", GGUF)
def test_malformed_gguf_is_refused(case: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(GGUF[case])
    cause = outcome(lambda: read_gguf_file(path))
    assert cause != "read" and "model.gguf" in cause and "\n" not in cause


@pytest.fixture(scope="module")
def good_gguf(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A whole llama file with a byte-level tokenizer."""
    path = tmp_path_factory.mktemp("gguf") / "good.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in {
        "context_length": 64, "embedding_length": 32, "block_count": 1, "feed_forward_length": 32,
        "attention.head_count": 2, "attention.head_count_kv": 1, "attention.key_length": 16,
    }.items():  # fmt: skip
        writer.add_uint32(f"llama.{key}", value)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    letters = ["<end>", *"Themul,123Ġ", "Th", "he", "The", "mu", "le", "ul"]
    tokens = list(dict.fromkeys(letters)) + [f"x{i}" for i in range(40)]
    writer.add_token_list(tokens[:40])
    writer.add_token_types([3] + [1] * 39)
    writer.add_token_merges(["T h", "Th e", "m u", "l e"])
    writer.add_eos_token_id(0)
    writer.add_chat_template("{{ messages }}")
    layer = {"attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
             "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
             "ffn_norm": "post_attention_layernorm",
             "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}  # fmt: skip
    values = weights()
    writer.add_tensor("token_embd.weight", values["model.embed_tokens.weight"])
    writer.add_tensor("output_norm.weight", values["model.norm.weight"])
    for ours, theirs in layer.items():
        value = values[f"model.layers.0.{theirs}.weight"]
        stored = value if value.ndim == 1 else gguf.quants.quantize(value, gguf.GGMLQuantizationType.Q8_0)
        kind = None if value.ndim == 1 else gguf.GGMLQuantizationType.Q8_0
        writer.add_tensor(f"blk.0.{ours}.weight", stored, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert outcome(lambda: read_gguf_file(path)) == "read"
    return path.read_bytes()


def test_damaged_gguf_headers_end_in_errors_of_ours(
    good_gguf: bytes, tmp_path: Path, seed: int, long: bool
) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(good_gguf)
    header = read_gguf(path).bytes

    def check(case: bytes) -> None:
        path.write_bytes(case)
        outcome(lambda: read_gguf_file(path))

    examples(spoiled(good_gguf, header), check, 5000 if long else 200, seed)


def test_metadata_of_any_kind_ends_in_errors_of_ours(
    good_gguf: bytes, tmp_path: Path, seed: int, long: bool
) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(good_gguf)
    header = read_gguf(path, ARRAYS)

    def check(case: Any) -> None:
        key, value = case
        header.metadata[key], old = value, header.metadata[key]
        try:
            outcome(lambda: ModelShape.from_config(gguf_config(header), "config"))
        finally:
            header.metadata[key] = old

    keys = [key for key in header.metadata if key not in ARRAYS]
    from hypothesis import strategies as st

    examples(st.tuples(st.sampled_from(keys), ODD_VALUES), check, 2000 if long else 100, seed)


# what a run keeps of them


def test_twisted_manifests_end_in_errors_of_ours(
    good_gguf: bytes, tmp_path: Path, seed: int, long: bool
) -> None:
    path, manifest = tmp_path / "model.gguf", tmp_path / "weights.json"
    path.write_bytes(good_gguf)
    good = json.loads(gguf_manifest(path).to_json())

    def check(case: Any) -> None:
        manifest.write_text(json.dumps(case))
        outcome(lambda: use(WeightSource.open(tmp_path)))

    def use(source: WeightSource) -> None:
        with source:
            source.check(SHAPE)
            for block in SHAPE.blocks():
                for parameter in block.parameters:
                    for _ in source.chunks(block, parameter, 1 << 12):
                        pass

    examples(twisted(good), check, 2000 if long else 100, seed)


def test_twisted_tokenizer_files_end_in_errors_of_ours(
    good_gguf: bytes, tmp_path: Path, seed: int, long: bool
) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(good_gguf)
    tokenizer_from_gguf(path).save(tmp_path)
    names = ("tokenizer.json", "tokenizer_config.json")
    good = {name: read_json(tmp_path / name) for name in names}

    def check(case: Any) -> None:
        for name in names:
            found = case.get(name) if isinstance(case, dict) else case
            (tmp_path / name).write_text(json.dumps(found))
        outcome(lambda: TextTokenizer.from_folder(tmp_path).encode(["The mule, 123"]))

    examples(twisted(good), check, 2000 if long else 100, seed)


@pytest.mark.parametrize("reader", [read_safetensors, read_gguf])
def test_what_is_no_file_is_refused(reader: Callable[[Path], Any], tmp_path: Path) -> None:
    assert outcome(lambda: reader(tmp_path)) != "read"
    assert outcome(lambda: reader(tmp_path / "missing")) != "read"
