"""A vocabulary cut down to a corpus gives its texts the same tokens, and still spells any text."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tests.unit.data.samples import CORPUS, PARTS, random_text
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from packmule.data.files import read_json, write_json
from packmule.data.gguf_tokenizer import tokenizer_from_gguf
from packmule.data.prune import kept_ids, prune_model_folder
from packmule.data.tokenizer import TextTokenizer
from packmule.errors import DataError

PRES = ("gpt-2", "smollm", "llama-bpe", "qwen2")


def model_folder(path: Path, tokenizer: TextTokenizer, vocab: int) -> Path:
    path.mkdir()
    tokenizer.save(path)
    ids = {"bos_token_id": tokenizer.bos, "eos_token_id": [tokenizer.eos, 0], "pad_token_id": tokenizer.pad}
    write_json(path / "config.json", {"model_type": "llama", "vocab_size": vocab, "hidden_size": 64, **ids})
    write_json(path / "generation_config.json", {**ids, "suppress_tokens": [5, vocab - 1], "top_k": 5})
    return path


def used_by(tokenizer: TextTokenizer, texts: list[str], vocab: int) -> np.ndarray:
    used = np.zeros(vocab, bool)
    for ids in tokenizer.encode(texts):
        used[ids] = True
    return used


@pytest.mark.parametrize("kind", [*PRES, "sentencepiece"])
def test_texts_of_the_corpus_have_the_same_tokens(
    kind: str, byte_level: Callable[..., Path], sentencepiece: Path, tmp_path: Path, seed: int
) -> None:
    rng = random.Random(seed)
    path = sentencepiece if kind == "sentencepiece" else byte_level(kind, add_bos=True)
    tokenizer = tokenizer_from_gguf(path)
    vocab = tokenizer.vocab + 7
    folder = model_folder(tmp_path / "model", tokenizer, vocab)
    words = rng.sample(PARTS, 8)
    corpus = [CORPUS[2], *("".join(rng.choice(words) for _ in range(20)) for _ in range(10))]
    used = used_by(tokenizer, corpus, vocab)
    kept = kept_ids(folder, used)
    assert (np.diff(kept) > 0).all() and set(np.flatnonzero(used)) <= set(kept.tolist())
    assert len(kept) < tokenizer.vocab
    target = tmp_path / "cut"
    target.mkdir()
    config = prune_model_folder(folder, target, kept)
    cut = TextTokenizer.from_folder(target)
    assert cut.vocab == config["vocab_size"] == len(kept)
    for before, after in zip(tokenizer.encode(corpus), cut.encode(corpus), strict=True):
        assert kept[after].tolist() == before
    # other texts are cut otherwise, but nothing is lost
    others = [*CORPUS, *(random_text(rng, 30) for _ in range(20))]
    for text, before, after in zip(others, tokenizer.encode(others), cut.encode(others), strict=True):
        assert cut.decode(after, special=True) == tokenizer.decode(before, special=True), repr(text)


def test_special_ids_follow_everywhere(byte_level: Callable[..., Path], tmp_path: Path) -> None:
    tokenizer = tokenizer_from_gguf(byte_level("gpt-2", add_bos=True))
    vocab = tokenizer.vocab
    folder = model_folder(tmp_path / "model", tokenizer, vocab)
    write_json(folder / "added_tokens.json", {"<|im_end|>": 2, "<|im_start|>": 1})
    kept = kept_ids(folder, np.zeros(vocab, bool))
    assert {0, 1, 2} <= set(kept.tolist())
    target = tmp_path / "cut"
    target.mkdir()
    config = prune_model_folder(folder, target, kept)
    new = {old: index for index, old in enumerate(kept.tolist())}
    generation = read_json(target / "generation_config.json")
    assert config["eos_token_id"] == generation["eos_token_id"] == [new[2], new[0]]
    assert generation["suppress_tokens"] == [new[5]] and generation["top_k"] == 5
    assert read_json(target / "added_tokens.json") == {"<|im_end|>": new[2], "<|im_start|>": new[1]}
    cut = TextTokenizer.from_folder(target)
    assert (cut.bos, cut.eos, cut.pad, cut.add_bos) == (new[1], new[2], new[2], True)
    assert cut.backend.encode("a").ids[0] == new[1]


def test_special_tokens_at_the_end_move_down(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_special_tokens(["<end>", "<user>"])
    backend.add_tokens(["mule train"])
    folder = tmp_path / "model"
    folder.mkdir()
    backend.save(str(folder / "tokenizer.json"))
    added = {str(index): {"content": token.content, "special": token.special}
             for index, token in backend.get_added_tokens_decoder().items()}  # fmt: skip
    write_json(folder / "tokenizer_config.json", {"eos_token": "<end>", "added_tokens_decoder": added})
    vocab, eos = backend.get_vocab_size(), backend.token_to_id("<end>")
    write_json(folder / "config.json", {"vocab_size": vocab, "eos_token_id": eos})
    tokenizer = TextTokenizer.from_folder(folder)
    text = "Once upon a mule train<end>"
    kept = kept_ids(folder, used_by(tokenizer, [text], vocab))
    target = tmp_path / "cut"
    target.mkdir()
    config = prune_model_folder(folder, target, kept)
    assert config["eos_token_id"] < eos
    theirs = transformers.AutoTokenizer.from_pretrained(target)
    assert kept[theirs(text, add_special_tokens=False).input_ids].tolist() == tokenizer.encode([text])[0]
    assert theirs.eos_token_id == config["eos_token_id"] == TextTokenizer.from_folder(target).eos


def test_vocabulary_that_is_no_bpe_is_refused(tmp_path: Path) -> None:
    backend = Tokenizer(models.WordLevel({"a": 0, "<end>": 1}, unk_token="a"))
    backend.save(str(tmp_path / "tokenizer.json"))
    write_json(tmp_path / "tokenizer_config.json", {"eos_token": "<end>"})
    with pytest.raises(DataError, match="WordLevel vocabulary cannot be cut down"):
        kept_ids(tmp_path, np.ones(2, bool))


def test_bytes_that_a_vocabulary_never_had_are_not_missed(tmp_path: Path) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    lacking = {"\u00c1", alphabet[-1]}  # as SmolLM2's, whose training never met some bytes
    vocab = {
        token: index for index, token in enumerate([t for t in alphabet if t not in lacking] + ["ab", "bc"])
    }
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[("a", "b"), ("b", "c")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.add_special_tokens(["<end>"])
    backend.save(str(tmp_path / "tokenizer.json"))
    write_json(tmp_path / "tokenizer_config.json", {"eos_token": "<end>"})
    write_json(tmp_path / "config.json", {"vocab_size": len(vocab) + 1})
    used = np.zeros(len(vocab) + 1, bool)
    used[vocab["bc"]] = True
    assert kept_ids(tmp_path, used).tolist() == [*(i for t, i in vocab.items() if t != "ab"), len(vocab)]
