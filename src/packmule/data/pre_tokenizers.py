"""How byte-level vocabularies cut text before merging, under the names that GGUF files give.

The names and what they stand for are llama.cpp's (src/llama-vocab.cpp); they are built here as the models'
own tokenizer.json files build them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from tokenizers.pre_tokenizers import PreTokenizer

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _WORDS + r"\p{N}{1,3}" + _REST
_QWEN2 = _WORDS + r"\p{N}" + _REST
_DIGIT = r"\p{N}"
_MARKS = r"[\p{P}\$\+<=>\^~\|"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_CASED_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def _cased(ending: str, numbers: str) -> str:
    lead = r"[^\r\n\p{L}\p{N}]?"
    return f"{lead}{_UPPER}*{_LOWER}+{ending}|{lead}{_UPPER}+{_LOWER}*{ending}|{numbers}{_CASED_REST}"


class Kind(NamedTuple):
    """One way to cut.

    Attributes:
        patterns: regular expressions applied in turn, each to the pieces of the one before; a match is a
            piece, and so is what lies between two.
        nfc: text is normalized to NFC first.
        ignore_merges: a word that is a token is taken whole, whatever the merges say.
        bos: documents begin with the begin-of-text token where the file does not say.
    """

    patterns: tuple[str, ...] = (_GPT2,)
    nfc: bool = False
    ignore_merges: bool = False
    bos: bool = False


KINDS: dict[str, Kind] = {
    **dict.fromkeys(("gpt-2", "olmo", "mpt", "phi-2", "jais", "trillion", "gigachat"), Kind()),
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"),
        Kind((_DIGIT, _GPT2)),
    ),
    **dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "lfm2"),
        Kind((_LLAMA3,), ignore_merges=True, bos=True),
    ),
    **dict.fromkeys(("dbrx", "smaug-bpe"), Kind((_LLAMA3,))),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), Kind((_QWEN2,), nfc=True)),
    "stablelm2": Kind((_QWEN2,)),
    "tekken": Kind((_cased("", _DIGIT),), ignore_merges=True),
    **dict.fromkeys(("gpt-4o", "llama4"), Kind((_cased(_ENDINGS, r"\p{N}{1,3}"),))),
    "deepseek-coder": Kind((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-\ud7ff]+", _DIGIT)),
    "falcon": Kind((_MARKS + "`]+", _GPT2, r"[0-9][0-9][0-9]")),
    "default": Kind((_MARKS + "]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
}
"""GGUF's name -> what it stands for. Of names for one kind the first is the one written."""

PROBE = (
    "The cat's 7 mules, we'LL say: DON'T carry 12345678 kg over HelloWorld's hill;  naïve café "
    "cafe\u0301 Ünïcode ½²③ 日本語のテスト ☕👩\u200d👧 한국어 русский العربية"
    "\n\n\tx = y+1 /* a//b */\n/path/to\n"
    "   if (a<b) { return 0x1F; }\r\n  trailing  \n \n...!!! don't I'm you've she'd 3.14 1,000,000 A1b2C3 end"
)
"""Text that each kind cuts in its own way."""


def pre_tokenizer(kind: Kind) -> PreTokenizer:
    """The kind as `tokenizers` runs it; pieces come out in the byte alphabet."""
    from tokenizers import Regex, pre_tokenizers

    # ByteLevel can cut by GPT-2's pattern itself, and Digits by single ones: both faster than a regex
    last = kind.patterns[-1] == _GPT2
    steps = [
        pre_tokenizers.Digits(individual_digits=True)
        if pattern == _DIGIT
        else pre_tokenizers.Split(Regex(pattern), behavior="isolated")
        for pattern in (kind.patterns[:-1] if last else kind.patterns)
    ]
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=last)
    return pre_tokenizers.Sequence([*steps, level]) if steps else level


def recognize(backend: Tokenizer, ignore_merges: bool) -> str | None:
    """GGUF's name for how a byte-level tokenizer cuts text, or None: told by what it does to PROBE."""
    from tokenizers import normalizers

    if backend.pre_tokenizer is None:
        return None
    normalizer = backend.normalizer
    text = PROBE if normalizer is None else normalizer.normalize_str(PROBE)
    found = [piece for piece, _ in backend.pre_tokenizer.pre_tokenize_str(text)]
    for name, kind in KINDS.items():
        wanted = normalizers.NFC().normalize_str(PROBE) if kind.nfc else PROBE
        if text == wanted and ignore_merges == kind.ignore_merges:
            pieces = pre_tokenizer(kind).pre_tokenize_str(wanted)
            if found == [piece for piece, _ in pieces]:
                return name
    return None
