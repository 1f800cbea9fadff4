"""A Hugging Face tokenizer as GGUF metadata. The way back is packmule.data.gguf_tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from packmule.data.files import read_text
from packmule.data.gguf import GgufHeader
from packmule.data.gguf_tokenizer import strips_after, tokenizer_from_metadata
from packmule.data.pre_tokenizers import PROBE, recognize
from packmule.data.tokenizer import TextTokenizer
from packmule.errors import DataError

_NORMAL, _UNKNOWN, _CONTROL, _USER, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6
_FOLDER = "export a Hugging Face folder, which keeps the tokenizer as it is"


def vocabulary_metadata(folder: Path, vocab: int) -> dict[str, Any]:
    """The keys under `tokenizer.` for the tokenizer and chat template of a model folder.

    Args:
        folder: holds tokenizer.json, tokenizer_config.json and perhaps chat_template.jinja.
        vocab: rows of the model's embedding; rows without a token are marked unused.

    Raises:
        DataError: no BPE, or one that cuts text in a way GGUF has no name for.
    """
    tokenizer = TextTokenizer.from_folder(folder)
    model = json.loads(tokenizer.backend.to_str())["model"]
    if (
        model.get("type") != "BPE"
        or model.get("continuing_subword_prefix")
        or model.get("end_of_word_suffix")
    ):
        raise DataError(f"{folder}: GGUF cannot hold a {model.get('type')} tokenizer.", _FOLDER)
    tokens, kinds = _tokens(tokenizer, vocab)
    found: dict[str, Any] = {"tokenizer.ggml.tokens": tokens}
    if model.get("byte_fallback"):
        found |= _sentencepiece(tokenizer, model, tokens, kinds)
    else:
        found |= _byte_level(tokenizer, model, folder)
    found["tokenizer.ggml.token_type"] = kinds
    if _strips_as_phi3(tokenizer):
        found["general.name"] = "Phi-3"
    unknown = tokenizer.backend.token_to_id(str(model["unk_token"])) if model.get("unk_token") else None
    ids = {"bos": tokenizer.bos, "eos": tokenizer.eos, "padding": tokenizer.pad, "unknown": unknown}
    for name, index in ids.items():
        if index is not None:
            found[f"tokenizer.ggml.{name}_token_id"] = index
    found["tokenizer.ggml.add_bos_token"] = tokenizer.add_bos
    found["tokenizer.ggml.add_eos_token"] = False
    template = chat_template(folder, tokenizer)
    if template is not None:
        found["tokenizer.chat_template"] = template
    _check(folder, tokenizer, found)
    return found


def chat_template(folder: Path, tokenizer: TextTokenizer) -> str | None:
    """The model's own template: chat_template.jinja, else what tokenizer_config.json holds."""
    path = folder / "chat_template.jinja"
    if path.exists():
        return read_text(path)
    found = tokenizer.config.get("chat_template")
    if isinstance(found, list):
        named = {entry.get("name"): entry.get("template") for entry in found if isinstance(entry, dict)}
        found = named.get("default")
    return found if isinstance(found, str) else None


def _tokens(tokenizer: TextTokenizer, vocab: int) -> tuple[list[str], list[int]]:
    tokens, kinds = [f"[PAD{index}]" for index in range(vocab)], [_UNUSED] * vocab
    for token, index in tokenizer.backend.get_vocab(with_added_tokens=True).items():
        if index < vocab:
            tokens[index], kinds[index] = token, _NORMAL
    for index, added in tokenizer.backend.get_added_tokens_decoder().items():
        kinds[index] = _CONTROL if added.special else _USER
    return tokens, kinds


def _byte_level(tokenizer: TextTokenizer, model: dict[str, Any], folder: Path) -> dict[str, Any]:
    pre = recognize(tokenizer.backend, bool(model.get("ignore_merges")))
    if pre is None:
        raise DataError(f"{folder}: GGUF has no name for how this tokenizer cuts text.", _FOLDER)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.merges": [" ".join(pair) for pair in _merges(model)],
    }


def _sentencepiece(
    tokenizer: TextTokenizer, model: dict[str, Any], tokens: list[str], kinds: list[int]
) -> dict[str, Any]:
    """A SentencePiece vocabulary: what is merged first scores highest, as in the order of the merges."""
    merges = _merges(model)
    scores = [-float(len(merges))] * len(tokens)
    at = {token: index for index, token in enumerate(tokens)}
    for rank, (left, right) in reversed(list(enumerate(merges))):
        scores[at[left + right]] = -float(rank)
    for index, token in enumerate(tokens):
        if token == model.get("unk_token"):
            kinds[index] = _UNKNOWN
        elif kinds[index] == _NORMAL and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            kinds[index] = _BYTE
        if kinds[index] != _NORMAL:
            scores[index] = 0.0
        if kinds[index] == _USER and not token.strip("▁"):
            tokens[index] = token.replace("▁", " ")  # llama.cpp looks for it in the text as it stands
    first = tokenizer.backend.encode("a", add_special_tokens=False).tokens
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.add_space_prefix": first[:1] != ["a"],
    }


def _merges(model: dict[str, Any]) -> list[tuple[str, str]]:
    # older files have "a b", newer ones ["a", "b"]
    pairs = [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]
    return [(left, right) for left, right in pairs]


def _strips_as_phi3(tokenizer: TextTokenizer) -> bool:
    """Whether white space is dropped after exactly those tokens for which Phi-3's name stands in GGUF."""
    added = tokenizer.backend.get_added_tokens_decoder().values()
    return any(token.rstrip for token in added) and all(
        token.rstrip == strips_after(token.content, "phi-3") for token in added
    )


def _check(folder: Path, tokenizer: TextTokenizer, found: dict[str, Any]) -> None:
    """The metadata read back must give the same ids, and where scores stand for merges the same merges."""
    numbers = ("tokenizer.ggml.scores", "tokenizer.ggml.token_type")
    arrays: dict[str, Any] = {key: np.array(found[key]) for key in numbers if key in found}
    header = GgufHeader(folder, {"general.architecture": "llama", **found, **arrays}, {}, 0)
    again = tokenizer_from_metadata(header)
    same = again.encode([PROBE]) == tokenizer.encode([PROBE])
    if same and "tokenizer.ggml.scores" in found:
        both = [json.loads(each.backend.to_str())["model"] for each in (tokenizer, again)]
        same = set(_merges(both[0])) == set(_merges(both[1]))
    if not same:
        raise DataError(f"{folder}: GGUF cannot express how this tokenizer cuts text.", _FOLDER)
