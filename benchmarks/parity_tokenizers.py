"""Tokenizers of models beside what becomes of them in GGUF: the same ids on real and random text.

    python benchmarks/parity_tokenizers.py FOLDER_OR_GGUF ...

Each argument is a Hugging Face folder with a tokenizer.json, or a .gguf file (weights are not needed). Its
tokenizer is written as GGUF metadata and read back; the ids of the standard library's source, of Python's
documentation and of random characters of many scripts, with special tokens and runs of white space, must be
equal. A ggml-vocab-*.gguf file with .inp and .out beside it, as llama.cpp's tests have them, is held to
those as well. Exit code 1 where something differs.
"""

from __future__ import annotations

import random
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from packmule.data.gguf import GgufHeader
from packmule.data.gguf_tokenizer import tokenizer_from_metadata
from packmule.data.gguf_vocabulary import vocabulary_metadata
from packmule.data.model_files import read_tokenizer
from packmule.data.tokenizer import TextTokenizer

SEED, TEXTS = 20261130, 600
POOLS = (
    "abcxyzABC", "0123456789", " \t\n\r", ".,;:!?'\"-_/\\()[]{}<>|@#$%^&*~`", "éüñçßøÅ", "日本語中文한국어",
    "русскийعربيहिन्दी", "☕👩\u200d👧🏽🇩🇪", "\u0301\u200d\u00a0\u2009\u3000▁", "½²③",
)  # fmt: skip
SEPARATOR = "\n__ggml_vocab_test__\n"


def texts(specials: list[str]) -> list[str]:
    """Real and random ones."""
    from pydoc_data.topics import topics

    rng, found = random.Random(SEED), list(topics.values())[:100]
    found += [
        p.read_text(encoding="utf-8", errors="ignore")[:20_000] for p in sorted(library().glob("a*.py"))
    ]
    for _ in range(TEXTS):
        parts = [
            "".join(rng.choices(rng.choice(POOLS), k=rng.randint(1, 6))) for _ in range(rng.randint(1, 15))
        ]
        parts += [" " * rng.randint(1, 70), "'s", " 'LL", *rng.choices(specials or [""], k=rng.randint(0, 3))]
        rng.shuffle(parts)
        found.append("".join(parts))
    return found


def library() -> Path:
    """The standard library's folder."""
    return Path(random.__file__).parent


def there_and_back(tokenizer: TextTokenizer) -> TextTokenizer:
    """What the tokenizer's GGUF metadata describes."""
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save(Path(folder))
        found = vocabulary_metadata(Path(folder), tokenizer.vocab)
    numbers = ("tokenizer.ggml.scores", "tokenizer.ggml.token_type")
    arrays = {key: np.array(found[key]) for key in numbers if key in found}
    header = GgufHeader(tokenizer.source, {"general.architecture": "llama", **found, **arrays}, {}, 0)
    return tokenizer_from_metadata(header)


def expected(path: Path) -> tuple[list[str], list[list[int]]]:
    """Texts and ids beside a ggml-vocab file, if there are any."""
    inputs, outputs = path.with_suffix(".gguf.inp"), path.with_suffix(".gguf.out")
    if not (inputs.exists() and outputs.exists()):
        return [], []
    ids = [[int(word) for word in line.split()] for line in outputs.read_text().rstrip("\n").split("\n")]
    return inputs.read_bytes().decode().split(SEPARATOR)[: len(ids)], ids


def main(arguments: list[str]) -> int:
    """Returns the exit code."""
    if not arguments:
        print("skipped: name Hugging Face folders or .gguf files")
        return 0
    broken = 0
    for path in map(Path, arguments):
        began = time.perf_counter()
        tokenizer = read_tokenizer(path)
        again = there_and_back(tokenizer)
        chosen = texts(list(tokenizer.specials))
        same = sum(a == b for a, b in zip(tokenizer.encode(chosen), again.encode(chosen), strict=True))
        stated, ids = expected(path)
        right = sum(a == b for a, b in zip(tokenizer.encode(stated), ids, strict=True))
        broken += (same, right) != (len(chosen), len(stated))
        beside = f", {right} of {len(stated)} as stated beside it" if stated else ""
        print(
            f"{path.name}: {tokenizer.vocab:,} tokens; {same} of {len(chosen)} texts the same{beside} "
            f"({time.perf_counter() - began:.0f} s)",
            flush=True,
        )
    return int(broken > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
