"""Tokenizers built from GGUF metadata agree with slow references, and load in transformers."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import regex
from tests.unit.data.samples import CORPUS, SPECIALS, random_text

from packmule.data.gguf import read_gguf
from packmule.data.gguf_tokenizer import ARRAYS, tokenizer_from_gguf, tokenizer_from_metadata
from packmule.data.tokenizer import TextTokenizer
from packmule.errors import DataError

# Patterns as llama.cpp states them (src/llama-vocab.cpp): applied one after the other.
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+END"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*END"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PATTERNS = {
    "gpt-2": [GPT2],
    "default": [r"[\p{P}$+<=>^~|]+", GPT2, r"\p{N}+", "[0-9]{3}"],
    "falcon": [r"[\p{P}$+<=>^~|`]+", GPT2, "[0-9]{3}"],
    "deepseek-coder": [
        r"[\r\n]",
        r"\s?\p{L}+",
        r"\s?\p{P}+",
        r"[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+",
        r"\p{N}",
    ],
    "smollm": [r"\p{N}", GPT2],
    "llama-bpe": [LLAMA3],
    "smaug-bpe": [LLAMA3],
    "qwen2": [LLAMA3.replace("{1,3}", "")],
    "stablelm2": [LLAMA3.replace("{1,3}", "")],
    "tekken": [CASED.replace("END", "").replace("{1,3}", "")],
    "gpt-4o": [CASED.replace("END", "(?i:'s|'t|'re|'ve|'m|'ll|'d)?")],
}


def byte_alphabet() -> list[str]:
    """GPT-2's bytes as characters: printable ones stay, the others follow from U+0100 on."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table, extra = [""] * 256, 0
    for byte in range(256):
        table[byte] = chr(byte) if byte in plain else chr(256 + extra)
        extra += byte not in plain
    return table


def slow_ids(text: str, pre: str, tokens: list[str], merges: list[tuple[str, str]]) -> list[int]:
    """BPE by the book: split, then join the best-ranked pair until none is left."""
    vocab = {token: index for index, token in enumerate(tokens)}
    rank = {pair: index for index, pair in enumerate(merges)}
    alphabet, out = byte_alphabet(), list[int]()
    for span in regex.split("(" + "|".join(map(regex.escape, SPECIALS)) + ")", text):
        if span in SPECIALS:
            out.append(vocab[span])
            continue
        words = [span]
        for pattern in PATTERNS[pre]:
            words = [part for word in words for part in _isolate(pattern, word)]
        for word in words:
            parts = [alphabet[byte] for byte in word.encode()]
            if pre in ("llama-bpe", "tekken") and "".join(parts) in vocab:
                parts = ["".join(parts)]
            while pairs := [p for p in pairwise(parts) if p in rank]:
                best = min(pairs, key=rank.__getitem__)
                at = next(i for i in range(len(parts)) if tuple(parts[i : i + 2]) == best)
                parts[at : at + 2] = ["".join(best)]
            out += [vocab[part] for part in parts]
    return out


def _isolate(pattern: str, text: str) -> list[str]:
    found, end = [], 0
    for match in regex.finditer(pattern, text):
        found += [text[end : match.start()], match[0]]
        end = match.end()
    return [part for part in (*found, text[end:]) if part]


@pytest.mark.parametrize("pre", PATTERNS)
def test_byte_level_ids_equal_slow_bpe(
    pre: str, byte_level: Callable[..., Path], learned: tuple[list[str], list[tuple[str, str]]], seed: int
) -> None:
    rng = random.Random(seed)
    texts = [*CORPUS, *(random_text(rng, rng.randrange(1, 40)) for _ in range(60))]
    tokenizer = tokenizer_from_gguf(byte_level(pre))
    for text, ids in zip(texts, tokenizer.encode(texts), strict=True):
        assert ids == slow_ids(text, pre, *learned), repr(text)
        assert tokenizer.decode(ids, special=True) == text


def test_text_in_pieces_has_the_ids_of_the_whole(
    byte_level: Callable[..., Path], sentencepiece: Path, seed: int
) -> None:
    from packmule.data.text import seam

    rng = random.Random(seed)
    for path in (*(byte_level(pre) for pre in PATTERNS), sentencepiece):
        tokenizer = tokenizer_from_gguf(path)
        text = random_text(rng, 3000) + "end of\nthe text"
        whole, ids, rest = tokenizer.encode([text])[0], list[int](), text
        while rest:
            cut = seam(rest, 400) if len(rest) > 400 else len(rest)
            assert cut < 400 or len(rest) <= 400
            encode = tokenizer.encode_continued if ids else tokenizer.encode
            ids += encode([rest[:cut]])[0]
            rest = rest[cut:]
        assert ids == whole, path.name


def test_sentencepiece_ids_equal_joining_by_score(sentencepiece: Path, seed: int) -> None:
    rng = random.Random(seed)
    tokenizer = tokenizer_from_gguf(sentencepiece)
    vocab = tokenizer.backend.get_vocab()
    assert (tokenizer.bos, tokenizer.eos, tokenizer.pad, tokenizer.add_bos) == (1, 2, None, True)
    words = ["the", "cat", "and", "there", "mule", "  ", "é", "\n", "☕", "tea"]
    for _ in range(40):
        text = " ".join(rng.choice(words) for _ in range(rng.randrange(1, 12)))
        # llama.cpp: join the neighbours whose result scores highest, which here is the lowest id
        parts = list("▁" + text.replace(" ", "▁"))
        while joined := [(vocab["".join(p)], i) for i, p in enumerate(pairwise(parts))
                         if "".join(p) in vocab]:  # fmt: skip
            at = min(joined)[1]
            parts[at : at + 2] = ["".join(parts[at : at + 2])]
        expected = [i for part in parts for i in
                    ([vocab[part]] if part in vocab else [3 + byte for byte in part.encode()])]  # fmt: skip
        assert tokenizer.encode([text])[0] == expected, repr(text)
        assert tokenizer.decode(expected) == text


def test_saved_folder_gives_the_same_tokenizer(
    byte_level: Callable[..., Path], sentencepiece: Path, tmp_path: Path
) -> None:
    for number, path in enumerate((byte_level("smollm"), byte_level("gpt-2", add_bos=True), sentencepiece)):
        made = tokenizer_from_gguf(path)
        folder = tmp_path / str(number)
        folder.mkdir()
        made.save(folder)
        read = TextTokenizer.from_folder(folder)
        fields = ("vocab", "bos", "eos", "pad", "add_bos", "digest", "config")
        assert [getattr(read, f) for f in fields] == [getattr(made, f) for f in fields]


def test_transformers_loads_the_saved_folder(
    byte_level: Callable[..., Path], sentencepiece: Path, tmp_path: Path, seed: int
) -> None:
    transformers = pytest.importorskip("transformers")
    rng = random.Random(seed)
    texts = [*CORPUS, *(random_text(rng, 20) for _ in range(10))]
    for number, path in enumerate((byte_level("smollm"), byte_level("qwen2", add_bos=True), sentencepiece)):
        made = tokenizer_from_gguf(path)
        folder = tmp_path / str(number)
        folder.mkdir()
        made.save(folder)
        theirs = transformers.AutoTokenizer.from_pretrained(folder)
        assert (theirs.bos_token_id, theirs.eos_token_id, theirs.pad_token_id) == (
            made.bos,
            made.eos,
            made.pad,
        )
        assert theirs.chat_template == made.config.get("chat_template")
        begin = [made.bos] if made.add_bos else []
        for text, ids in zip(texts, made.encode(texts), strict=True):
            assert theirs(text, add_special_tokens=False).input_ids == ids
            assert theirs(text).input_ids == begin + ids


def changed(path: Path, **metadata: Any) -> TextTokenizer:
    """The tokenizer of a file after a change of its metadata; None leaves a key out."""
    header = read_gguf(path, ARRAYS)
    kept = {**header.metadata, **{key.replace("__", "."): value for key, value in metadata.items()}}
    return tokenizer_from_metadata(
        replace(header, metadata={key: value for key, value in kept.items() if value is not None})
    )


def test_a_file_that_names_no_cut_gets_the_default(byte_level: Callable[..., Path], seed: int) -> None:
    texts = [random_text(random.Random(seed), 200)]
    path = byte_level("gpt-2")
    unnamed = changed(path, tokenizer__ggml__pre=None)
    assert unnamed.encode(texts) == changed(path, tokenizer__ggml__pre="default").encode(texts)
    assert unnamed.digest != tokenizer_from_gguf(path).digest


@pytest.mark.parametrize(("pre", "begins"), [("llama-bpe", True), ("gpt-2", False), ("tekken", False)])
def test_files_that_do_not_say_begin_documents_as_their_family_does(
    pre: str, begins: bool, byte_level: Callable[..., Path]
) -> None:
    assert changed(byte_level(pre), tokenizer__ggml__add_bos_token=None).add_bos == begins
    assert not changed(byte_level(pre), tokenizer__ggml__add_bos_token=False).add_bos


def test_white_space_after_the_special_tokens_of_phi3_is_dropped(sentencepiece: Path) -> None:
    named = changed(sentencepiece, general__name="Phi-3-mini-4k")
    plain = tokenizer_from_gguf(sentencepiece)
    # </s> drops what follows it, <s> and <unk> do not
    text = "</s> \n the<s> \n the<unk>  the"
    assert named.encode([text]) == plain.encode(["</s>the<s> \n the<unk>  the"])
    assert named.encode([text]) != plain.encode([text])


@pytest.mark.parametrize("spelled", ["stated", "respelled"])
def test_runs_of_spaces_are_one_user_defined_token(spelled: str, sentencepiece: Path, seed: int) -> None:
    """Gemma's: in GGUF they stand as spaces, with a score below all others."""
    header = read_gguf(sentencepiece, ARRAYS)
    tokens, runs = list(header.metadata["tokenizer.ggml.tokens"]), [2, 3, 4, 5, 6]
    tokens.remove("▁▁")
    kept = [i for i, t in enumerate(header.metadata["tokenizer.ggml.tokens"]) if t != "▁▁"]
    numbers = {k: header.metadata[f"tokenizer.ggml.{k}"][kept] for k in ("scores", "token_type")}
    mark = " " if spelled == "stated" else "▁"
    made = changed(
        sentencepiece,
        tokenizer__ggml__tokens=[*tokens, *(mark * n for n in runs)],
        tokenizer__ggml__scores=np.append(numbers["scores"], [-1000.0] * len(runs)),
        tokenizer__ggml__token_type=np.append(numbers["token_type"], [4] * len(runs)),
        tokenizer__ggml__add_space_prefix=False,
    )
    rng = random.Random(seed)
    for _ in range(30):
        words = [" " * rng.randint(1, 15) if rng.random() < 0.5 else rng.choice(["the", "cat", "mu"])
                 for _ in range(20)]  # fmt: skip
        text = "".join(words)
        found = [made.backend.id_to_token(i) for i in made.encode([text])[0]]
        assert made.decode(made.encode([text])[0]) == text
        cut = [len(piece) for piece in found if not piece.strip("▁")]
        whole = [n for run in re.findall(" +", text) for n in ([6] * (len(run) // 6) + [len(run) % 6]) if n]
        # a single space may belong to the word behind it
        assert [n for n in cut if n > 1] == [n for n in whole if n > 1], text


@pytest.mark.parametrize(("change", "message"), [
    ({"pre": "unheard-of"}, "pre-tokenizer 'unheard-of'"),
    ({"pre": "gpt-2", "model": "bert"}, "tokenizer 'bert'"),
])  # fmt: skip
def test_unsupported_tokenizer_is_named(
    change: dict[str, str], message: str, byte_level: Callable[..., Path]
) -> None:
    with pytest.raises(DataError, match=message):
        tokenizer_from_gguf(byte_level(**change))


def test_folder_without_end_of_text_is_refused(byte_level: Callable[..., Path], tmp_path: Path) -> None:
    tokenizer_from_gguf(byte_level("gpt-2")).save(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{}")
    with pytest.raises(DataError, match="end-of-text"):
        TextTokenizer.from_folder(tmp_path)
    (tmp_path / "config.json").write_text('{"eos_token_id": [2, 0]}')
    assert TextTokenizer.from_folder(tmp_path).eos == 2
