"""Tokenizers written as GGUF metadata and read back give the same ids."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.unit.data.samples import CORPUS, random_text
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from packmule.data.files import write_json
from packmule.data.gguf import GgufHeader, read_gguf
from packmule.data.gguf_tokenizer import ARRAYS, tokenizer_from_gguf, tokenizer_from_metadata
from packmule.data.gguf_vocabulary import vocabulary_metadata
from packmule.data.pre_tokenizers import KINDS, PROBE, pre_tokenizer
from packmule.data.tokenizer import TextTokenizer
from packmule.errors import DataError


def header_of(metadata: dict[str, Any]) -> GgufHeader:
    """As a file that holds this metadata would be read."""
    arrays = {key: np.array(value) for key, value in metadata.items()
              if isinstance(value, list) and not isinstance(value[0], str)}  # fmt: skip
    return GgufHeader(Path("x.gguf"), {"general.architecture": "llama", **metadata, **arrays}, {}, 0)


def folder_of(path: Path, tokenizer: TextTokenizer) -> Path:
    path.mkdir()
    tokenizer.save(path)
    return path


@pytest.mark.parametrize("kind", [*dict.fromkeys(KINDS.values()), "sentencepiece"])
def test_metadata_gives_the_tokenizer_back(
    kind: Any, byte_level: Callable[..., Path], sentencepiece: Path, tmp_path: Path, seed: int
) -> None:
    rng = random.Random(seed)
    name = next((name for name, found in KINDS.items() if found == kind), "")
    path = sentencepiece if kind == "sentencepiece" else byte_level(name, add_bos=rng.random() < 0.5)
    before = tokenizer_from_gguf(path)
    metadata = vocabulary_metadata(folder_of(tmp_path / "model", before), before.vocab + 3)
    assert metadata["tokenizer.ggml.model"] == ("llama" if kind == "sentencepiece" else "gpt2")
    assert metadata["tokenizer.ggml.pre"] == (name or "default")
    assert metadata["tokenizer.ggml.tokens"][-1] == f"[PAD{before.vocab + 2}]"
    after = tokenizer_from_metadata(header_of(metadata))
    texts = [*CORPUS, PROBE, *(random_text(rng, 30) for _ in range(40))]
    assert after.encode(texts) == before.encode(texts)
    assert [after.decode(ids) for ids in after.encode(texts)] == [
        before.decode(ids) for ids in before.encode(texts)
    ]
    assert (after.bos, after.eos, after.pad, after.add_bos) == (
        before.bos, before.eos, before.pad, before.add_bos,
    )  # fmt: skip
    assert after.config.get("chat_template") == before.config.get("chat_template")


def test_each_kind_cuts_the_probe_in_its_own_way() -> None:
    cuts = {
        kind: [piece for piece, _ in pre_tokenizer(kind).pre_tokenize_str(PROBE)] for kind in KINDS.values()
    }
    for one, other in combinations(cuts, 2):
        assert (cuts[one] == cuts[other]) == (one.patterns == other.patterns), (one, other)
    assert normalizers.NFC().normalize_str(PROBE) != PROBE


def trained(split: Any, folder: Path) -> Path:
    """A folder with a byte-level tokenizer that cuts by `split`."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer, backend.decoder = split, decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=350,
        special_tokens=["<end>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    folder.mkdir()
    backend.save(str(folder / "tokenizer.json"))
    write_json(folder / "tokenizer_config.json", {"eos_token": "<end>"})
    return folder


def test_another_spelling_of_a_kind_is_recognized(tmp_path: Path) -> None:
    digits = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(r"\p{N}"), behavior="isolated"),
        pre_tokenizers.Split(
            Regex(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"), "isolated"
        ),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])  # fmt: skip
    metadata = vocabulary_metadata(trained(digits, tmp_path / "m"), 350)
    assert metadata["tokenizer.ggml.pre"] == "smollm"


@pytest.mark.parametrize("split", [
    pre_tokenizers.ByteLevel(add_prefix_space=True),
    pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.ByteLevel(False, use_regex=False)]
    ),
])  # fmt: skip
def test_a_cut_without_a_name_is_refused(split: Any, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no name for how this tokenizer cuts text"):
        vocabulary_metadata(trained(split, tmp_path / "m"), 350)


def test_a_tokenizer_that_is_no_bpe_is_refused(tmp_path: Path) -> None:
    Tokenizer(models.Unigram([("a", 0.0), ("<end>", 0.0)], 0)).save(str(tmp_path / "tokenizer.json"))
    write_json(tmp_path / "tokenizer_config.json", {"eos_token": "<end>"})
    with pytest.raises(DataError, match="cannot hold a Unigram tokenizer"):
        vocabulary_metadata(tmp_path, 2)


def test_white_space_dropped_after_special_tokens_comes_back(sentencepiece: Path, tmp_path: Path) -> None:
    header = read_gguf(sentencepiece, ARRAYS)
    before = tokenizer_from_metadata(replace(header, metadata={**header.metadata, "general.name": "phi3"}))
    metadata = vocabulary_metadata(folder_of(tmp_path / "model", before), before.vocab)
    assert metadata["general.name"] == "Phi-3"
    after = tokenizer_from_metadata(header_of(metadata))
    texts = ["</s> \n the<s> the</s>the", "the </s>  <unk> cat"]
    assert after.encode(texts) == before.encode(texts)


def test_runs_of_spaces_are_written_as_they_stand_in_text(sentencepiece: Path, tmp_path: Path) -> None:
    header = read_gguf(sentencepiece, ARRAYS)
    at = header.metadata["tokenizer.ggml.tokens"].index("▁▁")
    kinds = header.metadata["tokenizer.ggml.token_type"].copy()
    kinds[at] = 4
    before = tokenizer_from_metadata(
        replace(header, metadata={**header.metadata, "tokenizer.ggml.token_type": kinds})
    )
    metadata = vocabulary_metadata(folder_of(tmp_path / "model", before), before.vocab)
    assert metadata["tokenizer.ggml.tokens"][at] == "  " and metadata["tokenizer.ggml.token_type"][at] == 4
    after = tokenizer_from_metadata(header_of(metadata))
    assert after.backend.id_to_token(at) == "▁▁"
    texts = ["the   cat    and", "  the▁▁cat"]
    assert after.encode(texts) == before.encode(texts)


def test_a_run_of_spaces_that_other_joins_go_before_is_refused(sentencepiece: Path, tmp_path: Path) -> None:
    before = tokenizer_from_gguf(sentencepiece)
    before.backend.add_tokens([AddedToken("▁▁", normalized=False)])
    with pytest.raises(DataError, match="cannot express how this tokenizer cuts"):
        vocabulary_metadata(folder_of(tmp_path / "model", before), before.vocab)


def test_joins_that_scores_cannot_express_are_refused(sentencepiece: Path, tmp_path: Path) -> None:
    before = tokenizer_from_gguf(sentencepiece)
    text = json.loads(before.backend.to_str())
    # "▁the" can be cut in several ways, and scores stand for all of them
    text["model"]["merges"] = [m for m in text["model"]["merges"] if m != ["▁t", "he"]]
    before.save(tmp_path)
    (tmp_path / "tokenizer.json").write_text(json.dumps(text))
    with pytest.raises(DataError, match="cannot express how this tokenizer cuts"):
        vocabulary_metadata(tmp_path, before.vocab)


def test_user_defined_and_special_tokens_stay_apart(byte_level: Callable[..., Path], tmp_path: Path) -> None:
    before = tokenizer_from_gguf(byte_level("gpt-2"))
    before.backend.add_tokens(["mule train"])
    folder = folder_of(tmp_path / "model", before)
    metadata = vocabulary_metadata(folder, before.vocab + 1)
    assert metadata["tokenizer.ggml.token_type"][-1] == 4
    assert metadata["tokenizer.ggml.token_type"][:3] == [3, 3, 3]
    after = tokenizer_from_metadata(header_of(metadata))
    texts = ["a mule train of mules", "<|im_end|>mule train<|endoftext|>"]
    assert after.encode(texts) == TextTokenizer.from_folder(folder).encode(texts)
    assert before.vocab in after.encode(texts)[0]
