"""A Hugging Face tokenizer from a GGUF file's metadata: byte-level BPE ("gpt2") and
SentencePiece BPE ("llama"). The way back is packmule.data.gguf_vocabulary."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from packmule.data.gguf import GgufHeader, read_gguf
from packmule.data.pre_tokenizers import KINDS, pre_tokenizer
from packmule.data.tokenizer import TextTokenizer
from packmule.errors import DataError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

ARRAYS = tuple(f"tokenizer.ggml.{name}" for name in ("tokens", "merges", "scores", "token_type"))
"""The arrays that a header must have been read with."""
_UNKNOWN, _CONTROL, _USER = 2, 3, 4
_LONGEST = 1024
"""Characters of a token whose ways to be cut in two are listed."""
_STRIPPED, _UNSTRIPPED = ("phi-3", "phi3"), ("<unk>", "<s>", "<|endoftext|>")


def tokenizer_from_gguf(path: Path) -> TextTokenizer:
    """Build the tokenizer a GGUF file describes.

    Raises:
        DataError: a kind of tokenizer that is not supported, or damaged metadata.
    """
    return tokenizer_from_metadata(read_gguf(path, ARRAYS))


def tokenizer_from_metadata(header: GgufHeader) -> TextTokenizer:
    """Like `tokenizer_from_gguf`, from a header read with the tokenizer's arrays."""
    path = header.path
    kind = header.require("tokenizer.ggml.model")
    tokens = _strings(header, "tokens")
    if kind == "llama":
        tokens = _spelled(header, tokens)
    if kind not in ("gpt2", "llama"):
        raise DataError(
            f"{path}: tokenizer {kind!r:.80} is not supported.",
            "supported: gpt2, llama; or give a Hugging Face folder",
        )
    vocab = {token: index for index, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        raise DataError(
            f"{path}: {len(tokens) - len(vocab)} tokens occur twice in the vocabulary.",
            "convert the model again",
        )
    backend = _byte_level(header, vocab) if kind == "gpt2" else _sentencepiece(header, tokens, vocab)
    _add_special(backend, header, tokens)
    ids = {name: _token_id(header, key, len(tokens)) for name, key in
           (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))}  # fmt: skip
    eos, bos = ids["eos"], ids["bos"]
    if eos is None:
        raise DataError(f"{path}: the metadata names no end-of-text token.", "convert the model again")
    begins = kind == "llama" or KINDS[_pre(header)].bos
    add_bos = bool(header.metadata.get("tokenizer.ggml.add_bos_token", begins)) and bos is not None
    if add_bos and bos is not None:
        _begin_with(backend, tokens[bos], bos)
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{f"{name}_token": None if index is None else tokens[index] for name, index in ids.items()},
        "add_bos_token": add_bos,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": header.count(f"{header.require('general.architecture')}.context_length", 2048),
    }
    template = header.metadata.get("tokenizer.chat_template")
    if isinstance(template, str):
        config["chat_template"] = template
    return TextTokenizer(backend, len(tokens), bos, eos, ids["pad"], add_bos, config, path)


def _spelled(header: GgufHeader, tokens: list[str]) -> list[str]:
    """User-defined runs of spaces as the vocabulary has them: GGUF keeps them as they stand in text."""
    known = set(tokens)
    return [
        spelled
        if kind == _USER and not token.strip(" ") and (spelled := token.replace(" ", "▁")) not in known
        else token
        for token, kind in zip(tokens, _types(header, len(tokens)), strict=True)
    ]


def strips_after(token: str, name: object) -> bool:
    """Whether white space after a special token is dropped: in Phi-3, which GGUF files tell by the model's
    name alone (llama.cpp, src/llama-vocab.cpp)."""
    return any(part in str(name).lower() for part in _STRIPPED) and token not in _UNSTRIPPED


def _strings(header: GgufHeader, key: str) -> list[str]:
    found = header.require(f"tokenizer.ggml.{key}")
    if not isinstance(found, list) or not found:
        raise DataError(
            f"{header.path}: tokenizer.ggml.{key} is no list of strings.", "convert the model again"
        )
    return found


def _numbers(header: GgufHeader, key: str, count: int) -> list[Any]:
    found = header.require(f"tokenizer.ggml.{key}")
    if not isinstance(found, np.ndarray) or len(found) != count:
        raise DataError(
            f"{header.path}: tokenizer.ggml.{key} is no list of {count} numbers, one per token.",
            "convert the model again",
        )
    values: list[Any] = found.tolist()
    return values


def _types(header: GgufHeader, count: int) -> list[int]:
    """Each token's kind; all are normal in a file that does not say."""
    known = "tokenizer.ggml.token_type" in header.metadata
    return _numbers(header, "token_type", count) if known else [1] * count


def _pre(header: GgufHeader) -> str:
    """The name of how text is cut. Files from before there were names get the default, as in llama.cpp."""
    return str(header.metadata.get("tokenizer.ggml.pre", "default"))


def _byte_level(header: GgufHeader, vocab: dict[str, int]) -> Tokenizer:
    from tokenizers import Tokenizer, decoders, models, normalizers

    pairs = [(left, right) for left, _, right in (m.partition(" ") for m in _strings(header, "merges"))]
    if any(not {*pair, "".join(pair)} <= vocab.keys() for pair in pairs):
        raise DataError(f"{header.path}: a merge does not fit the vocabulary.", "convert the model again")
    pre = _pre(header)
    if pre not in KINDS:
        raise DataError(
            f"{header.path}: pre-tokenizer {pre!r:.80} is not supported (known: {', '.join(KINDS)}).",
            "give the model's Hugging Face folder, which holds its tokenizer.json",
        )
    kind = KINDS[pre]
    backend = Tokenizer(models.BPE(vocab=vocab, merges=pairs, ignore_merges=kind.ignore_merges))
    backend.decoder = decoders.ByteLevel()
    backend.pre_tokenizer = pre_tokenizer(kind)
    if kind.nfc:
        backend.normalizer = normalizers.NFC()
    return backend


def _sentencepiece(header: GgufHeader, tokens: list[str], vocab: dict[str, int]) -> Tokenizer:
    from tokenizers import Tokenizer, decoders, models, normalizers

    unknown = _token_id(header, "unknown", len(tokens))
    backend = Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=_merges(header, tokens, vocab),
            unk_token=None if unknown is None else tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefix = bool(header.metadata.get("tokenizer.ggml.add_space_prefix", True))
    # a space before the text even if it begins with one, as SentencePiece and llama.cpp add it
    spaces = [normalizers.Prepend("▁")] if prefix else []
    backend.normalizer = normalizers.Sequence([*spaces, normalizers.Replace(" ", "▁")])
    steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix:
        steps.append(decoders.Strip(content=" ", left=1))
    backend.decoder = decoders.Sequence(steps)
    return backend


def _merges(header: GgufHeader, tokens: list[str], vocab: dict[str, int]) -> list[tuple[str, str]]:
    """SentencePiece joins the pair whose result scores highest: every way to cut a token in two,
    ordered by the token's score, as transformers' generate_merges orders them."""
    scores = _numbers(header, "scores", len(tokens))
    kinds = _types(header, len(tokens))
    found = []
    for token, stated, kind in zip(tokens, scores, kinds, strict=True):
        # a user-defined token is one piece wherever it stands, whatever score the converter gave it
        score = math.inf if kind == _USER else stated
        if len(token) > _LONGEST:
            raise DataError(f"{header.path}: a token has {len(token)} characters.", "convert the model again")
        pairs = [(token[:i], token[i:]) for i in range(1, len(token))]
        pairs = sorted(
            (p for p in pairs if p[0] in vocab and p[1] in vocab), key=lambda p: (vocab[p[0]], vocab[p[1]])
        )
        found += [(score, left, right) for left, right in pairs]
    found.sort(key=lambda merge: (merge[0], len(merge[1]), len(merge[2])), reverse=True)
    return [(left, right) for _, left, right in found]


def _add_special(backend: Tokenizer, header: GgufHeader, tokens: list[str]) -> None:
    from tokenizers import AddedToken

    name = header.metadata.get("general.name")
    special, user = list[AddedToken](), list[AddedToken]()
    for token, kind in zip(tokens, _types(header, len(tokens)), strict=True):
        if kind in (_UNKNOWN, _CONTROL, _USER):
            stripped = strips_after(token, name)
            found = AddedToken(token, normalized=False, special=kind != _USER, rstrip=stripped)
            (user if kind == _USER else special).append(found)
    backend.add_special_tokens(special)
    backend.add_tokens(user)


def _token_id(header: GgufHeader, key: str, count: int) -> int | None:
    value = header.metadata.get(f"tokenizer.ggml.{key}_token_id")
    # some converters write 2**32 - 1 for "none"
    return value if isinstance(value, int) and 0 <= value < count else None


def _begin_with(backend: Tokenizer, token: str, index: int) -> None:
    from tokenizers import processors

    backend.post_processor = processors.TemplateProcessing(
        single=f"{token}:0 $A:0", pair=f"{token}:0 $A:0 {token}:1 $B:1", special_tokens=[(token, index)]
    )
