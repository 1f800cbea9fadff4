"""Bytes per token add up to the bytes of the text, for the kinds of tokenizer whose tokens say."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from packmule.data.token_bytes import token_bytes

TEXTS = ("the mule carries grain", "café 日本語 🙂 naïve", "a  b\tc\n\nd", "x", "été à la montagne")
SPECIAL = ["<end>", "<pad>"]


def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    return tokenizer


def byte_fallback() -> Tokenizer:
    """Like Llama 2's: spaces are U+2581, unknown characters fall back to bytes."""
    vocab = {name: number for number, name in enumerate([*SPECIAL, *(f"<0x{b:02X}>" for b in range(256))])}
    for piece in ("\u2581", "t", "h", "e", "m", "u", "l", "\u2581t", "\u2581th", "\u2581the", "é"):
        vocab.setdefault(piece, len(vocab))
    merges = [("\u2581", "t"), ("\u2581t", "h"), ("\u2581th", "e")]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, byte_fallback=True, unk_token=None))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.add_special_tokens(SPECIAL)
    return tokenizer


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
def test_the_bytes_of_a_texts_tokens_are_those_of_the_text(make: object, seed: int) -> None:
    tokenizer = make()  # type: ignore[operator]
    found = token_bytes(json.loads(tokenizer.to_str()))
    assert found is not None
    rng = random.Random(seed)
    for _ in range(20):
        text = "".join(rng.choice("".join(TEXTS)) for _ in range(rng.randint(1, 30)))
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert int(found[np.array(ids)].sum()) == len(text.encode()), text
    assert [int(found[tokenizer.token_to_id(name)]) for name in SPECIAL] == [0, 0]


def test_added_tokens_that_are_text_count_as_text() -> None:
    tokenizer = byte_level()
    tokenizer.add_tokens([AddedToken("münchen", special=False)])
    found = token_bytes(json.loads(tokenizer.to_str()))
    assert found is not None
    assert int(found[tokenizer.token_to_id("münchen")]) == len("münchen".encode())


def test_a_kind_whose_tokens_do_not_say_is_unknown() -> None:
    tokenizer = Tokenizer(models.WordPiece(vocab={"[UNK]": 0, "a": 1, "##b": 2}, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece()
    assert token_bytes(json.loads(tokenizer.to_str())) is None
