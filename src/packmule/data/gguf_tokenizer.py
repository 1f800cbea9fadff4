"""A Hugging Face tokenizer from a GGUF file's metadata: byte-level BPE ("gpt2") and
SentencePiece BPE ("llama"). The pre-tokenizers are those llama.cpp uses for the same names
(src/llama-vocab.cpp), written as the models' own tokenizer.json files write them."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from packmule.data.gguf import GgufHeader, read_gguf
from packmule.data.tokenizer import TextTokenizer
from packmule.errors import DataError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_ARRAYS = tuple(f"tokenizer.ggml.{name}" for name in ("tokens", "merges", "scores", "token_type"))
_CONTROL, _USER = 3, 4
_GPT2 = ("gpt-2", "default", "olmo", "mpt")
_DIGITS = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone")
_LLAMA3 = ("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral")
_QWEN2 = ("qwen2", "deepseek-r1-qwen")
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def tokenizer_from_gguf(path: Path) -> TextTokenizer:
    """Build the tokenizer a GGUF file describes.

    Raises:
        DataError: a kind of tokenizer that is not supported, or damaged metadata.
    """
    header = read_gguf(path, _ARRAYS)
    tokens: list[str] = header.require("tokenizer.ggml.tokens")
    kind = header.require("tokenizer.ggml.model")
    if kind not in ("gpt2", "llama"):
        raise DataError(
            f"{path}: tokenizer {kind!r} is not supported.",
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
    add_bos = bool(header.metadata.get("tokenizer.ggml.add_bos_token", kind == "llama")) and bos is not None
    if add_bos and bos is not None:
        _begin_with(backend, tokens[bos], bos)
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{f"{name}_token": None if index is None else tokens[index] for name, index in ids.items()},
        "add_bos_token": add_bos,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": header.count("llama.context_length", 2048),
    }
    if "tokenizer.chat_template" in header.metadata:
        config["chat_template"] = header.metadata["tokenizer.chat_template"]
    return TextTokenizer(backend, len(tokens), bos, eos, ids["pad"], add_bos, config, path)


def _byte_level(header: GgufHeader, vocab: dict[str, int]) -> Tokenizer:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    pairs = [tuple(merge.split(" ")) for merge in header.require("tokenizer.ggml.merges")]
    if any(len(pair) != 2 or not {*pair, "".join(pair)} <= vocab.keys() for pair in pairs):
        raise DataError(f"{header.path}: a merge does not fit the vocabulary.", "convert the model again")
    pre = str(header.metadata.get("tokenizer.ggml.pre", "default"))
    backend = Tokenizer(models.BPE(vocab=vocab, merges=pairs, ignore_merges=pre in _LLAMA3))
    backend.decoder = decoders.ByteLevel()
    split = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    if pre in _GPT2:
        backend.pre_tokenizer = split
    elif pre in _DIGITS:
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), split]
        )
    elif pre in _LLAMA3 or pre in _QWEN2:
        numbers = r"\p{N}{1,3}" if pre in _LLAMA3 else r"\p{N}"
        words = pre_tokenizers.Split(Regex(_WORDS + numbers + _REST), behavior="isolated")
        backend.pre_tokenizer = pre_tokenizers.Sequence([words, plain])
        if pre in _QWEN2:
            backend.normalizer = normalizers.NFC()
    else:
        known = ", ".join(chain(_GPT2[:2], _DIGITS, _LLAMA3, _QWEN2))
        raise DataError(
            f"{header.path}: pre-tokenizer {pre!r} is not supported (known: {known}).",
            "give the model's Hugging Face folder, which holds its tokenizer.json",
        )
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
    scores = header.require("tokenizer.ggml.scores")
    if len(scores) != len(tokens):
        raise DataError(
            f"{header.path}: {len(scores)} scores for {len(tokens)} tokens.", "convert the model again"
        )
    found = []
    for token, score in zip(tokens, scores.tolist(), strict=True):
        pairs = [(token[:i], token[i:]) for i in range(1, len(token))]
        pairs = sorted(
            (p for p in pairs if p[0] in vocab and p[1] in vocab), key=lambda p: (vocab[p[0]], vocab[p[1]])
        )
        found += [(score, left, right) for left, right in pairs]
    found.sort(key=lambda merge: (merge[0], len(merge[1]), len(merge[2])), reverse=True)
    return [(left, right) for _, left, right in found]


def _add_special(backend: Tokenizer, header: GgufHeader, tokens: list[str]) -> None:
    from tokenizers import AddedToken

    kinds = header.metadata.get("tokenizer.ggml.token_type")
    if kinds is None:
        return
    if len(kinds) != len(tokens):
        raise DataError(
            f"{header.path}: {len(kinds)} token types for {len(tokens)} tokens.", "convert the model again"
        )
    pairs = list(zip(tokens, kinds.tolist(), strict=True))
    backend.add_special_tokens(
        [AddedToken(t, normalized=False, special=True) for t, k in pairs if k == _CONTROL]
    )
    backend.add_tokens([AddedToken(t, normalized=False, special=False) for t, k in pairs if k == _USER])


def _token_id(header: GgufHeader, key: str, count: int) -> int | None:
    value = header.metadata.get(f"tokenizer.ggml.{key}_token_id")
    # some converters write 2**32 - 1 for "none"
    return value if isinstance(value, int) and 0 <= value < count else None


def _begin_with(backend: Tokenizer, token: str, index: int) -> None:
    from tokenizers import processors

    backend.post_processor = processors.TemplateProcessing(
        single=f"{token}:0 $A:0", pair=f"{token}:0 $A:0 {token}:1 $B:1", special_tokens=[(token, index)]
    )
