"""`python -m packmule.data.prepare`: model and dataset -> OUT/model and OUT/data, without torch.

Reads one JSON request (PrepareRequest) from the argument or standard input. Prints JSON lines:

    {"event": "progress", "phase": "tokenize", "done": 1048576, "total": 2097152}
    {"event": "report", "report": {...}}                                  PrepareReport
    {"event": "error", "kind": "DataError", "cause": ..., "hint": ..., "exit_code": 2}
    {"event": "end"}                                                      always the last line

OUT/data/data.json (DataIndex) names the store and the row sets in use; it is written last, so a
crash leaves the old data or the new. Stores are kept by content and are made once.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import numpy as np
from pydantic import Field

from packmule.data.files import disk_errors, read_text, write_text
from packmule.data.model_files import prepare_model
from packmule.data.rows import Rows, RowsMeta, validation_documents, write_rows
from packmule.data.sources import find_files, hash_file
from packmule.data.store import TokenStore, store_key, write_store
from packmule.data.tokenizer import TextTokenizer
from packmule.errors import PackmuleError
from packmule.spec.records import Record

Progress = Callable[[str, int, int], None]
INDEX = "data.json"


class PrepareRequest(Record):
    """What to prepare, and where."""

    model: str = Field(description=".gguf file or Hugging Face folder")
    dataset: tuple[str, ...] = Field(min_length=1, description="files, folders, globs")
    max_seq_length: int = Field(ge=2)
    val_size: float = Field(default=0.0, ge=0, description="fraction below 1, or documents")
    validation_only: bool = Field(default=False, description="hold all documents out, for evaluation")
    seed: int = 0
    out: str = Field(description="run folder")
    sample_prompt: str = Field(default="", description="text whose token ids the report gives")
    random_init: bool = Field(default=False, description="draw the weights instead of reading them")


class DataIndex(Record):
    """OUT/data/data.json: folders relative to OUT/data."""

    format: int = 1
    store: str
    train: str
    validation: str | None


class PrepareReport(Record):
    """What was prepared. Lengths in tokens; `fill` in percent of rows * max_seq_length."""

    documents: int
    tokens: int
    train: RowsMeta
    validation: RowsMeta | None
    train_fill_percent: float
    reused: bool = Field(description="the token store was there already")
    sample_ids: tuple[int, ...] = Field(default=(), description="of the sample prompt, bos first if used")
    seconds: float
    peak_ram_bytes: int | None = Field(description="VmHWM of this process, where /proc has it")


@dataclass(frozen=True)
class PreparedData:
    """The data of a run, opened."""

    store: TokenStore
    train: Rows
    validation: Rows | None


def open_data(folder: Path) -> PreparedData:
    """Open OUT/data as `prepare` left it.

    Raises:
        DataError, ConfigError, DamagedFile: missing, of another version, or damaged.
    """
    index = DataIndex.parse_json(read_text(folder / INDEX), str(folder / INDEX))
    validation = Rows(folder / index.validation) if index.validation else None
    return PreparedData(TokenStore(folder / index.store), Rows(folder / index.train), validation)


def prepare(request: PrepareRequest, progress: Progress) -> PrepareReport:
    """Write OUT/model and OUT/data.

    Args:
        progress: called with (phase, done, total); phases are model, hash, tokenize, pack.

    Raises:
        PackmuleError: see the modules that do the parts.
    """
    began = time.monotonic()
    out = Path(request.out)
    progress("model", 0, 1)
    seed = request.seed if request.random_init else None
    tokenizer = prepare_model(Path(request.model).expanduser(), out / "model", seed)
    progress("model", 1, 1)
    store_folder, reused = _store(request, tokenizer, out / "data", progress)
    store = TokenStore(store_folder)
    progress("pack", 0, store.meta.documents)
    index, train, validation = _pack(request, store, out / "data")
    progress("pack", store.meta.documents, store.meta.documents)
    write_text(out / "data" / INDEX, index.to_json())
    store.close()
    return PrepareReport(
        documents=store.meta.documents,
        tokens=store.meta.tokens,
        train=train,
        validation=validation,
        train_fill_percent=100 * train.fill,
        reused=reused,
        sample_ids=_prompt_ids(tokenizer, request.sample_prompt),
        seconds=time.monotonic() - began,
        peak_ram_bytes=peak_ram_bytes(),
    )


def _prompt_ids(tokenizer: TextTokenizer, prompt: str) -> tuple[int, ...]:
    if not prompt:
        return ()
    start = [tokenizer.bos] if tokenizer.add_bos and tokenizer.bos is not None else []
    return (*start, *tokenizer.encode([prompt])[0])


def peak_ram_bytes(status: Path = Path("/proc/self/status")) -> int | None:
    """VmHWM of this process, or None where the system does not tell."""
    try:
        lines = status.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), None)


def _store(
    request: PrepareRequest, tokenizer: TextTokenizer, folder: Path, progress: Progress
) -> tuple[Path, bool]:
    files = find_files(request.dataset)
    total = sum(path.stat().st_size for path in files)
    hashed = 0

    def count(block: int) -> None:
        nonlocal hashed
        hashed += block
        progress("hash", hashed, total)

    sources = [hash_file(path, count) for path in files]
    key = store_key(tokenizer, sources)
    target = folder / f"tokens-{key[:16]}"
    if (target / "meta.json").exists():
        store = TokenStore(target)
        store.close()
        if store.meta.key == key:
            return target, True
    write_store(target, tokenizer, sources, lambda done: progress("tokenize", done, total))
    return target, False


def _pack(
    request: PrepareRequest, store: TokenStore, folder: Path
) -> tuple[DataIndex, RowsMeta, RowsMeta | None]:
    name = f"rows-{store.meta.key[:16]}-{request.max_seq_length}"
    if request.validation_only:
        every = write_rows(
            folder / f"{name}-all", store, np.ones(store.meta.documents, bool), request.max_seq_length
        )
        index = DataIndex(store=store.folder.name, train=f"{name}-all", validation=f"{name}-all")
        return index, every, every
    held_out = validation_documents(store.meta.documents, request.val_size, request.seed)
    if held_out.any():
        name += f"-{request.val_size:g}-{request.seed}"
    train = write_rows(folder / f"{name}-train", store, ~held_out, request.max_seq_length)
    validation = None
    if held_out.any():
        validation = write_rows(folder / f"{name}-validation", store, held_out, request.max_seq_length)
    index = DataIndex(
        store=store.folder.name,
        train=f"{name}-train",
        validation=f"{name}-validation" if validation else None,
    )
    return index, train, validation


class _Lines:
    """Prints progress as JSON lines: each phase's first and last, and five a second between."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._phase, self._next = stream, "", 0.0

    def __call__(self, phase: str, done: int, total: int) -> None:
        now = time.monotonic()
        if phase == self._phase and done < total and now < self._next:
            return
        self._phase, self._next = phase, now + 0.2
        self.write({"event": "progress", "phase": phase, "done": done, "total": total})

    def write(self, line: dict[str, Any]) -> None:
        print(json.dumps(line), file=self._stream, flush=True)


def main(arguments: list[str], stdin: TextIO, stdout: TextIO) -> int:
    """The command: returns the exit code."""
    lines = _Lines(stdout)
    try:
        text = arguments[0] if arguments else stdin.read()
        request = PrepareRequest.parse_json(text, "prepare request")
        with disk_errors(request.out):
            Path(request.out, "data").mkdir(parents=True, exist_ok=True)
        lines.write({"event": "report", "report": prepare(request, lines).model_dump(mode="json")})
    except PackmuleError as error:
        fields = {"kind": type(error).__name__, "cause": error.cause, "hint": error.hint}
        lines.write({"event": "error", **fields, "exit_code": error.exit_code})
        return error.exit_code
    finally:
        lines.write({"event": "end"})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], sys.stdin, sys.stdout))
