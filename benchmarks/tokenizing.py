"""Tokenizing throughput of data preparation beside that of the tokenizers library alone.

    python benchmarks/tokenizing.py [MODEL] [MEGABYTES]
    python benchmarks/tokenizing.py MODEL --large GIGABYTES

Text is the standard library's source as one JSON record per file of it, repeated; MODEL a .gguf file or a
folder with a tokenizer (default: models/smollm2-135m-instruct.gguf; where that is missing, a byte-level BPE
trained on the text). The library encodes the same texts, which
are in memory, in batches of its own, with all threads; Packmule reads, parses, encodes and writes a token
store. Rounds in turn, each pair in the other order than the one before; the median of their ratios counts,
since other work on the machine slows both. Exit code 1 when Packmule is below 0.8 of the library.

--large writes that much text (the same, with other numbers in each copy) and runs data preparation on it, as
`packmule train` starts it. Exit code 1 when its peak resident memory is 200 MB or more.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

from packmule.data.model_files import read_tokenizer
from packmule.data.report import PrepareRequest
from packmule.data.sources import hash_file
from packmule.data.tokenize import write_store
from packmule.data.tokenizer import TextTokenizer

LEAST_SHARE = 0.8
MOST_BYTES = 200_000_000
ROUNDS = 7
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


def write_large(path: Path, size: int) -> int:
    """JSON records of about `size` bytes in all; returns the exact number."""
    pieces, written, copy = texts(1), 0, 0
    with open(path, "w", encoding="utf-8") as file:
        while written < size:
            for number, piece in enumerate(pieces):
                # digits are shifted by the copy's number, and a first line names it
                table = str.maketrans("0123456789", "".join(str((d + copy) % 10) for d in range(10)))
                text = f"# copy {copy}, piece {number}\n{piece.translate(table)}"
                written += file.write(json.dumps({"text": text}) + "\n")
                if written >= size:
                    break
            copy += 1
    return written


def large(model: Path, gigabytes: float) -> int:
    """Prepare that much; returns the exit code."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "text.jsonl")
        size = write_large(path, int(gigabytes * 1e9))
        request = PrepareRequest(
            model=str(model.resolve()),
            dataset=(str(path),),
            max_seq_length=1024,
            out=str(Path(folder, "run")),
        )
        command = [sys.executable, "-m", "packmule.data.prepare", request.model_dump_json()]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    events = [json.loads(line) for line in done.stdout.splitlines()]
    report = next(event["report"] for event in events if event["event"] == "report")
    peak, took = report["peak_ram_bytes"], report["seconds"]
    print(
        f"{size / 1e9:.2f} GB of JSON lines, {report['documents']:,} documents, {report['tokens']:,} tokens: "
        f"{took:.0f} s, {size / 1e6 / took:.2f} MB/s with hashing and packing; peak {peak / 1e6:.0f} MB "
        f"(limit {MOST_BYTES / 1e6:.0f})"
    )
    return int(peak >= MOST_BYTES)


def seconds(work: Callable[[], object]) -> float:
    """Of one call."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def main(arguments: list[str]) -> int:
    """Returns the exit code."""
    model = Path(arguments[0]) if arguments else MODEL
    if arguments[1:2] == ["--large"]:
        return large(model, float(arguments[2]))
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

        took: dict[str, list[float]] = {"packmule": [], "tokenizers": []}
        works = {"packmule": ours, "tokenizers": library}
        for number in range(ROUNDS):
            for name in sorted(works, reverse=number % 2 == 1):
                took[name].append(seconds(works[name]))
    shares = [theirs / mine for mine, theirs in zip(took["packmule"], took["tokenizers"], strict=True)]
    share = median(shares)
    print(f"{megabytes:.1f} MB, {os.cpu_count()} cores, {tokenizer.source.name}, {ROUNDS} rounds")
    for name, times in took.items():
        print(f"{name:12} {megabytes / median(times):7.2f} MB/s (best {megabytes / min(times):.2f})")
    print(f"share {share:.2f} (rounds: {', '.join(f'{each:.2f}' for each in shares)}; limit {LEAST_SHARE})")
    return int(share < LEAST_SHARE)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
