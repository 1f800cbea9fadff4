"""Tiny tokenizers in GGUF files, with vocabularies learned from a fixed text."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import gguf
import pytest
from tests.unit.data.samples import CORPUS, SPECIALS, close, write_header
from tokenizers import Tokenizer, models, pre_tokenizers, trainers


@pytest.fixture(scope="session")
def learned() -> tuple[list[str], list[tuple[str, str]]]:
    """Byte-level tokens (specials first) and merges."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=SPECIALS, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    tokens = sorted(backend.get_vocab().items(), key=lambda item: item[1])
    merges = [tuple(pair) for pair in json.loads(backend.to_str())["model"]["merges"]]
    return [token for token, _ in tokens], merges


@pytest.fixture
def byte_level(tmp_path: Path, learned: tuple[list[str], list[tuple[str, str]]]) -> Callable[[str], Path]:
    """Writes a GGUF with a byte-level tokenizer of the named pre-tokenizer."""
    tokens, merges = learned

    def write(pre: str, **changes: object) -> Path:
        path = tmp_path / f"{pre}.gguf"
        writer = gguf.GGUFWriter(path, "llama")
        write_header(writer, len(tokens))
        writer.add_tokenizer_model(str(changes.get("model", "gpt2")))
        writer.add_tokenizer_pre(pre)
        writer.add_token_list(tokens)
        writer.add_token_types([3] * len(SPECIALS) + [1] * (len(tokens) - len(SPECIALS)))
        writer.add_token_merges([" ".join(pair) for pair in merges])
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_pad_token_id(2)
        writer.add_add_bos_token(bool(changes.get("add_bos", False)))
        writer.add_chat_template("{{ messages }}")
        close(writer)
        return path

    return write


@pytest.fixture
def sentencepiece(tmp_path: Path) -> Path:
    """A GGUF with a SentencePiece tokenizer: bytes, characters and words with falling scores."""
    words = ["▁t", "he", "▁the", "▁c", "at", "▁cat", "▁a", "nd", "▁and", "re", "▁there", "▁mule", "ul", "▁m"]
    words += ["▁mu", "le", "▁th", "▁▁", "▁ther"]
    letters = sorted(set("".join(CORPUS).replace(" ", "▁")) - set("\n\r\t") | set("▁thecatndrmul"))
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *words, *letters]
    scores = [0.0] * 259 + [-float(i) for i in range(len(words) + len(letters))]
    path = tmp_path / "sentencepiece.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    write_header(writer, len(tokens))
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores(scores)
    writer.add_token_types([2, 3, 3] + [6] * 256 + [1] * (len(words) + len(letters)))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    close(writer)
    return path
