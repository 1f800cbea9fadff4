"""What `packmule export` writes loads elsewhere, computes the same, and can be trained again."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from tests.cli.bench import Bench, Done

from packmule.data.gguf import read_gguf
from packmule.data.manifest import folder_manifest, gguf_manifest
from packmule.data.tokenizer import TextTokenizer
from packmule.models.weights.decode import to_bfloat16
from packmule.models.weights.names import hf_name
from packmule.models.weights.source import FileSource
from packmule.shapes.model import ModelShape


def weights(path: Path, config: Path) -> dict[str, np.ndarray]:
    """All tensors of a folder or a .gguf file, float32 by Hugging Face name."""
    shape = ModelShape.from_config(json.loads(config.read_text()), str(config))
    manifest = gguf_manifest(path) if path.suffix == ".gguf" else folder_manifest(path)
    found = {}
    with FileSource(manifest) as source:
        source.check(shape)
        for block in shape.blocks():
            for parameter in block.parameters:
                chunks = [chunk.copy() for _, chunk in source.chunks(block, parameter)]
                found[hf_name(block, parameter)] = np.concatenate(chunks).reshape(parameter.shape)
    return found


def test_a_gguf_file_loads_in_transformers_with_equal_logits(trained: Done, bench: Bench, seed: int) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    found = bench.run("export", "run", "out.gguf", "--dtype", "F32", "--json").succeeded().json
    assert (found["output"], found["dtype"]) == ("out.gguf", "F32")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        bench.folder, gguf_file="out.gguf", dtype=torch.float32
    )
    own = transformers.AutoModelForCausalLM.from_pretrained(
        bench.folder / "run" / "final", dtype=torch.float32
    )
    ids = torch.randint(0, own.config.vocab_size, (2, 20), generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        assert torch.equal(theirs(ids).logits, own(ids).logits)


def test_each_format_holds_the_runs_weights_rounded(trained: Done, bench: Bench) -> None:
    config = bench.folder / "run" / "model" / "config.json"
    exact = weights(bench.folder / "run" / "final", config)
    bench.run("export", "run", "half.gguf").succeeded()
    bench.run("export", "run", "brain.gguf", "--dtype", "bf16").succeeded()
    bench.run("export", "run", "half", "--dtype", "float16", "--shard-size", "20kB").succeeded()
    assert len(list((bench.folder / "half").glob("model-*.safetensors"))) > 2
    for path in (bench.folder / "half.gguf", bench.folder / "half"):
        for name, value in weights(path, config).items():
            # a .gguf file keeps vectors as they are
            whole = path.suffix == ".gguf" and value.ndim == 1
            expected = exact[name] if whole else exact[name].astype(np.float16).astype(np.float32)
            assert np.array_equal(value, expected), (path.name, name)
    for name, value in weights(bench.folder / "brain.gguf", config).items():
        bits = (to_bfloat16(exact[name]).astype(np.uint32) << 16).view(np.float32)
        assert np.array_equal(value, exact[name] if value.ndim == 1 else bits), name


def test_an_exported_file_is_a_model_to_train(trained: Done, bench: Bench) -> None:
    bench.run("export", "run", "again.gguf", "--dtype", "q8_0").succeeded()
    bench.job(
        "from_gguf", model__path="again.gguf", model__init="pretrained", train__max_steps=1,
        optim__learning_rate=0, optim__weight_decay=0,
    )  # fmt: skip
    bench.run("train", "from_gguf.yaml").succeeded()
    config = bench.folder / "from_gguf" / "model" / "config.json"
    stored = weights(bench.folder / "again.gguf", config)
    kept = weights(bench.folder / "from_gguf" / "final", config)
    assert stored.keys() == kept.keys()
    assert all(np.array_equal(stored[name], kept[name]) for name in stored)
    bench.write_texts("held_out.jsonl", ["the mule rests in shade and carries grain over a hill"])
    before, after = (
        bench.run("eval", run, "--dataset", "held_out.jsonl", "--json").succeeded().json["loss"]
        for run in ("run", "from_gguf")
    )
    assert after == pytest.approx(before, rel=0.02)


FEW = ["the mule", "the mill by noon", "a mule rests by the mill"]


def test_a_pruned_export_computes_the_same_on_its_corpus(trained: Done, bench: Bench) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    bench.write_texts("few.jsonl", FEW)
    words = ("--dtype", "float32", "--prune-vocab", "--corpus", "few.jsonl")
    shown = bench.run("export", "run", "pruned", *words).succeeded().out
    whole, pruned = bench.folder / "run" / "final", bench.folder / "pruned"
    before, after = TextTokenizer.from_folder(whole), TextTokenizer.from_folder(pruned)
    assert after.vocab < before.vocab
    assert f"vocabulary: {after.vocab:,} of {before.vocab:,} tokens" in shown
    models = [
        transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        for path in (whole, pruned)
    ]
    kept = [before.backend.token_to_id(str(after.backend.id_to_token(i))) for i in range(after.vocab)]
    old, new = (model.get_input_embeddings().weight for model in models)
    assert torch.equal(new, old[kept])
    for text, wide, narrow in zip(FEW, before.encode(FEW), after.encode(FEW), strict=True):
        assert [kept[i] for i in narrow] == wide, text
        with torch.no_grad():
            expected = models[0](torch.tensor([wide])).logits
            logits = models[1](torch.tensor([narrow])).logits
        # Narrower products may sum in another order, not more.
        torch.testing.assert_close(logits, expected[..., kept], rtol=1e-5, atol=1e-5)
    assert after.decode(after.encode(["naïve ☕ text!"])[0]) == "naïve ☕ text!"


def test_a_pruned_export_says_what_it_saves_and_leaves_nothing_behind(trained: Done, bench: Bench) -> None:
    bench.write_texts("few.jsonl", FEW)
    words = (
        "export",
        "run",
        "few.gguf",
        "--dtype",
        "F32",
        "--prune-vocab",
        "--corpus",
        "few.jsonl",
        "--json",
    )
    found = bench.run(*words).succeeded().json
    cut = found["vocabulary"]
    hidden = json.loads((bench.folder / "model" / "config.json").read_text())["hidden_size"]
    # tied: one matrix
    assert cut["bytes_saved"] == (cut["before"] - cut["after"]) * hidden * 4 > 0
    assert read_gguf(bench.folder / "few.gguf").metadata["llama.vocab_size"] == cut["after"]
    # by default to the run's own data
    own = bench.run("export", "run", "pruned_own", "--prune-vocab", "--json").succeeded().json["vocabulary"]
    assert cut["after"] < own["after"] <= own["before"]
    assert not [path.name for path in (bench.folder / "run").iterdir() if "packmule-export" in path.name]


def test_a_model_that_is_no_run_is_converted_both_ways(trained: Done, bench: Bench) -> None:
    config = bench.folder / "run" / "model" / "config.json"
    exact = weights(bench.folder / "run" / "final", config)
    bench.run("export", "run/final", "first.gguf", "--dtype", "F32").succeeded()
    shown = bench.run("export", "first.gguf", "first", "--dtype", "float32", "--json").succeeded().json
    assert (shown["output"], shown["dtype"]) == ("first", "float32")
    for name, value in weights(bench.folder / "first", config).items():
        assert np.array_equal(value, exact[name]), name
    tokenizers = [TextTokenizer.from_folder(bench.folder / path) for path in ("run/final", "first")]
    before, after = (tokenizer.encode([*FEW, "naïve ☕"]) for tokenizer in tokenizers)
    assert before == after
    assert not list(bench.folder.glob("packmule-export-*"))


def test_a_models_vocabulary_is_cut_to_a_corpus_as_a_runs_is(trained: Done, bench: Bench) -> None:
    bench.write_texts("few.jsonl", FEW)
    words = ("--prune-vocab", "--corpus", "few.jsonl", "--dtype", "float32")
    bench.run("export", "run/final", "cut_model", *words).succeeded()
    bench.run("export", "run", "cut_run", *words).succeeded()
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        model, run = ((bench.folder / path / name).read_bytes() for path in ("cut_model", "cut_run"))
        assert model == run, name


def test_a_model_has_no_data_to_cut_its_vocabulary_to(trained: Done, bench: Bench) -> None:
    message = bench.run("export", "run/final", "new", "--prune-vocab").refused()
    assert "run/final is a model" in message and "--corpus PATH" in message
    message = bench.run("export", "nothing", "new").refused()
    assert "nothing is neither a run nor a model." in message
    message = bench.run("export", "model", "new").refused()
    assert "model" in message and "safetensors" in message
    assert not (bench.folder / "new").exists() and not list(bench.folder.glob("packmule-export-*"))
