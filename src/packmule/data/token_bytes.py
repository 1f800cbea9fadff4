"""How many bytes of text each token stands for, read off a tokenizer.json; for bits per byte.

Known for byte-level BPE (each character of a token is a byte: GPT-2's alphabet) and for
SentencePiece-like vocabularies (a token is its text, U+2581 is a space, <0xAB> is a byte). Special
tokens stand for no text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from packmule.data.files import disk_errors, read_json

NAME = "token_bytes.bin"
_BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_MOST = 65535


def token_bytes(tokenizer: Mapping[str, Any]) -> np.ndarray | None:
    """uint16 [largest id + 1], or None for a kind of tokenizer whose tokens do not say.

    Args:
        tokenizer: tokenizer.json.
    """
    vocab = tokenizer.get("model", {}).get("vocab")
    if isinstance(vocab, list):  # Unigram: [token, score] in the order of ids
        vocab = {entry[0]: number for number, entry in enumerate(vocab)}
    kinds = _kinds(tokenizer.get("decoder")) | _kinds(tokenizer.get("pre_tokenizer"))
    if not isinstance(vocab, dict) or not kinds & {"ByteLevel", "ByteFallback", "Metaspace"}:
        return None
    added = tokenizer.get("added_tokens") or []
    last = max([*vocab.values(), *(token["id"] for token in added)], default=-1)
    found = np.zeros(last + 1, np.uint16)
    for text, number in vocab.items():
        found[number] = min(_MOST, len(text) if "ByteLevel" in kinds else _size(text))
    for token in added:
        found[token["id"]] = 0 if token.get("special") else min(_MOST, len(token["content"].encode()))
    return found


def _size(text: str) -> int:
    return 1 if _BYTE.fullmatch(text) else len(text.replace("\u2581", " ").encode())


def _kinds(part: Any) -> set[str]:
    """The types that a pre-tokenizer or decoder is made of."""
    if not isinstance(part, dict):
        return set()
    inner = [*(part.get("decoders") or []), *(part.get("pretokenizers") or [])]
    return {str(part.get("type"))}.union(*map(_kinds, inner))


def write_token_bytes(model: Path) -> None:
    """Put the table beside a prepared model's tokenizer.json, if its tokens say; else remove it.

    Raises:
        DataError: tokenizer.json cannot be read.
        DiskError: the folder cannot be written.
    """
    found = token_bytes(read_json(model / "tokenizer.json"))
    with disk_errors(model):
        if found is None:
            (model / NAME).unlink(missing_ok=True)
        else:
            (model / NAME).write_bytes(found.astype("<u2").tobytes())


def read_token_bytes(model: Path, vocab: int) -> np.ndarray | None:
    """int32 [vocab] of a prepared model folder, or None where they are not known."""
    path = model / NAME
    if not path.exists():
        return None
    raw = np.frombuffer(path.read_bytes(), "<u2")[:vocab]
    found = np.zeros(vocab, np.int32)
    found[: len(raw)] = raw
    return found
