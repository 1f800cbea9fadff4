"""Cutting a vocabulary down to the tokens that a corpus uses (Ernie's embedding pruning, catalog 000:2).

Of a BPE vocabulary the used tokens stay, what their merges pass through, and enough to spell any text: bytes
and added tokens. Ids keep their order. Texts of the corpus then have the same tokens as before: a merge that
BPE chooses among all merges is still there, so it is still the first of those that remain.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from packmule.data.files import read_json, write_json, write_text
from packmule.data.model_files import copy_model_files
from packmule.data.prepared import open_data
from packmule.data.store import TokenStore
from packmule.data.tokenizer import TextTokenizer
from packmule.errors import DataError

_CONFIG, _GENERATION = "config.json", "generation_config.json"
_READ = 1 << 20


def used_ids(store: TokenStore, vocab: int) -> np.ndarray:
    """Which ids a token store holds: bool [vocab]."""
    used = np.zeros(vocab, bool)
    for start in range(0, store.meta.tokens, _READ):
        used[store.read(start, min(_READ, store.meta.tokens - start))] = True
    return used


def ids_of_data(data: Path, model: Path, vocab: int) -> np.ndarray:
    """The ids that stay when a vocabulary is cut down to prepared data, ascending: int64 [kept].

    Args:
        data: OUT/data, as prepared.
        model: OUT/model, the prepared model folder.

    Raises:
        DataError: as `kept_ids`; PackmuleError: as `open_data`.
    """
    found = open_data(data)
    used = used_ids(found.store, vocab)
    for held_out in found.validation:
        used |= used_ids(held_out.store, vocab)
    return kept_ids(model, used)


def kept_ids(folder: Path, used: np.ndarray) -> np.ndarray:
    """The ids that stay when a vocabulary is cut down, ascending: int64 [kept].

    Args:
        folder: a prepared model folder.
        used: bool [vocab], the ids that the corpus uses.

    Raises:
        DataError: the tokenizer is no BPE.
    """
    tokenizer = TextTokenizer.from_folder(folder)
    model = _bpe(folder, tokenizer)
    vocab: dict[str, int] = model["vocab"]
    kept = used.copy()
    for index in tokenizer.backend.get_added_tokens_decoder():
        kept[index] = True
    for name in (_CONFIG, _GENERATION):
        for index in _named_ids(read_json(folder / name) if (folder / name).exists() else {}):
            if index < len(kept):
                kept[index] = True
    if model.get("unk_token") in vocab:
        kept[vocab[model["unk_token"]]] = True
    spelling = _spelling(model)
    kept[[vocab[token] for token in spelling]] = True
    ranks = {pair: rank for rank, pair in enumerate(_merges(model))}
    tokens = {index: token for token, index in vocab.items()}
    for index in np.flatnonzero(used).tolist():
        if index in tokens:
            for part in _path(tokens[index], ranks):
                if part in vocab:
                    kept[vocab[part]] = True
    return np.flatnonzero(kept)


def prune_model_folder(source: Path, target: Path, kept: np.ndarray) -> dict[str, Any]:
    """Write the model folder of a vocabulary cut down to `kept`; returns its config.json.

    Token ids in tokenizer, configuration and generation files are changed to the new ones. weights.json
    is left out: rows `kept` of embedding and head are the new ones.

    Raises:
        DataError: as `kept_ids`.
        DiskError: the target cannot be written.
    """
    new = {old: index for index, old in enumerate(kept.tolist())}
    copy_model_files(source, target)
    tokenizer = TextTokenizer.from_folder(source)
    _bpe(source, tokenizer)
    write_text(target / "tokenizer.json", json.dumps(_tokenizer(tokenizer, new), ensure_ascii=False))
    found = dict(tokenizer.config)
    if "added_tokens_decoder" in found:
        decoder = found["added_tokens_decoder"]
        found["added_tokens_decoder"] = {str(new[int(old)]): token for old, token in decoder.items()}
    write_json(target / "tokenizer_config.json", found)
    added = target / "added_tokens.json"
    if added.exists():
        write_json(added, {token: new[old] for token, old in read_json(added).items() if old in new})
    if (source / _GENERATION).exists():
        write_json(target / _GENERATION, _renumbered(read_json(source / _GENERATION), new))
    config = {**_renumbered(read_json(source / _CONFIG), new), "vocab_size": len(new)}
    write_json(target / _CONFIG, config)
    return config


def _bpe(folder: Path, tokenizer: TextTokenizer) -> dict[str, Any]:
    model: dict[str, Any] = json.loads(tokenizer.backend.to_str())["model"]
    if (
        model.get("type") != "BPE"
        or model.get("continuing_subword_prefix")
        or model.get("end_of_word_suffix")
    ):
        raise DataError(
            f"{folder}: a {model.get('type')} vocabulary cannot be cut down.",
            "export without `--prune-vocab`",
        )
    return model


def _spelling(model: dict[str, Any]) -> list[str]:
    """Tokens that spell whatever the whole vocabulary spells: all bytes <0x00> to <0xFF> where it falls back
    to them, else every single character, which BPE begins with. (A byte-level one's are bytes too; those
    that its training never met are missing, as they are in SmolLM2's.)"""
    vocab = model["vocab"]
    fallback = [f"<0x{byte:02X}>" for byte in range(256)] if model.get("byte_fallback") else []
    found = [token for token in fallback if token in vocab]
    if found and len(found) == len(fallback):
        return found
    return [*found, *(token for token in vocab if len(token) == 1)]


def _merges(model: dict[str, Any]) -> list[tuple[str, str]]:
    pairs = [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]
    return [(left, right) for left, right in pairs]


def _path(token: str, ranks: Mapping[tuple[str, str], int]) -> set[str]:
    """Every piece that BPE passes through from a token's characters to the token."""
    parts = list(token)
    seen = set(parts)
    while len(parts) > 1:
        at, rank = -1, len(ranks)
        for i, pair in enumerate(pairwise(parts)):
            found = ranks.get(pair, rank)
            if found < rank:
                at, rank = i, found
        if at < 0:
            # no merges lead there: such a token is matched whole, or not at all
            return {token}
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
        seen.add(parts[at])
    return seen


def _tokenizer(tokenizer: TextTokenizer, new: Mapping[int, int]) -> dict[str, Any]:
    """tokenizer.json with the new ids and the merges that remain."""
    data: dict[str, Any] = json.loads(tokenizer.backend.to_str())
    model = data["model"]
    vocab = {token: new[old] for token, old in model["vocab"].items() if old in new}
    merges = [pair for pair in _merges(model) if {*pair, "".join(pair)} <= vocab.keys()]
    data["model"] = {**model, "vocab": vocab, "merges": merges}
    data["added_tokens"] = [{**token, "id": new[token["id"]]} for token in data["added_tokens"]]
    data["post_processor"] = _post_processor(data.get("post_processor"), new)
    return data


def _post_processor(found: Any, new: Mapping[int, int]) -> Any:
    """The same processor with its special tokens' new ids."""
    if not isinstance(found, dict):
        return found
    changed = dict(found)
    if "processors" in found:
        changed["processors"] = [_post_processor(part, new) for part in found["processors"]]
    for name in ("sep", "cls"):
        if name in found:
            changed[name] = [found[name][0], new[found[name][1]]]
    if isinstance(found.get("special_tokens"), dict):
        changed["special_tokens"] = {
            name: {**token, "ids": [new[old] for old in token["ids"]]}
            for name, token in found["special_tokens"].items()
        }
    return changed


def _named_ids(config: Mapping[str, Any]) -> list[int]:
    """Ids under the `..._token_id` keys of a configuration."""
    found: list[int] = []
    for key, value in config.items():
        if key.endswith("_token_id"):
            found += [v for v in (value if isinstance(value, list) else [value]) if type(v) is int and v >= 0]
    return found


def _renumbered(config: Mapping[str, Any], new: Mapping[int, int]) -> dict[str, Any]:
    """A configuration with new ids; ids of tokens that are gone are left out of lists."""

    def change(value: Any) -> Any:
        if isinstance(value, list):
            return [new[v] for v in value if v in new]
        return new.get(value) if type(value) is int else value

    ids = ("_token_id", "suppress_tokens")
    return {key: change(value) if key.endswith(ids) else value for key, value in config.items()}
