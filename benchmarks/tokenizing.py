"""Tokenizing throughput of data preparation beside that of the tokenizers library alone.

    python benchmarks/tokenizing.py [MODEL] [MEGABYTES]

Text is the standard library's source as one JSON record per file of it, repeated; MODEL a .gguf file or a
folder with a tokenizer (default: models/smollm2-135m-instruct.gguf; where that is missing, a byte-level BPE
trained on the text). The library encodes the same texts, which
are in memory, in batches of its own, with all threads; Packmule reads, parses, encodes and writes a token
store. Best of three rounds in turn. Exit code 1 when Packmule is below 0.8 of the library.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from packmule.data.model_files import read_tokenizer
from packmule.data.prepare import peak_ram_bytes
from packmule.data.sources import hash_file
from packmule.data.tokenize import write_store
from packmule.data.tokenizer import TextTokenizer

LEAST_SHARE = 0.8
ROUNDS = 3
BATCH = 512
MODEL = Path("models/smollm2-135m-instruct.gguf")


def texts(megabytes: float) -> list[str]:
    """Python files of the standard library, again and again, in pieces of at most 4,000 characters."""
    folder = Path(os.__file__).parent
    files = [p.read_text(encoding="utf-8", errors="ignore") for p in sorted(folder.glob("*.py"))]
    pieces = [text[i : i + 4000] for text in files for i in range(0, len(text), 4000)]
    found: list[str] = []
    size = 0.0
    while size < megabytes * 1e6:
        found += pieces
        size += sum(map(len, pieces))
    return found


def trained_tokenizer() -> TextTokenizer:
    """A byte-level BPE of 8,000 tokens."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=8000, special_tokens=["<end>"], initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(texts(1), trainer)
    return TextTokenizer(backend, backend.get_vocab_size(), None, 0, None, False, {}, Path("trained here"))


def seconds(work: Callable[[], object]) -> float:
    """Of one call."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def main(arguments: list[str]) -> int:
    """Returns the exit code."""
    model = Path(arguments[0]) if arguments else MODEL
    documents = texts(float(arguments[1]) if len(arguments) > 1 else 24)
    tokenizer = read_tokenizer(model) if arguments or model.exists() else trained_tokenizer()
    megabytes = sum(len(text.encode()) for text in documents) / 1e6
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "text.jsonl")
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents), encoding="utf-8")
        groups = [[hash_file(path, lambda done: None)]]

        def ours() -> None:
            write_store(Path(folder, "store"), tokenizer, groups, lambda done: None)

        def library() -> None:
            for at in range(0, len(documents), BATCH):
                tokenizer.backend.encode_batch_fast(documents[at : at + BATCH], add_special_tokens=False)

        best = {"tokenizers": float("inf"), "packmule": float("inf")}
        for _ in range(ROUNDS):
            best["packmule"] = min(best["packmule"], seconds(ours))
            best["tokenizers"] = min(best["tokenizers"], seconds(library))
    share = best["tokenizers"] / best["packmule"]
    print(f"{megabytes:.1f} MB, {os.cpu_count()} cores, {tokenizer.source.name}")
    for name, took in best.items():
        print(f"{name:12} {took:7.2f} s {megabytes / took:7.2f} MB/s")
    print(
        f"share {share:.2f} (limit {LEAST_SHARE}); peak {(peak_ram_bytes() or 0) / 1e6:.0f} MB with the texts"
    )
    return int(share < LEAST_SHARE)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
