"""`python -m packmule.data.prepare`: model and dataset -> OUT/model and OUT/data, without torch.

Reads one JSON request (PrepareRequest) from the argument or standard input. Prints JSON lines:

    {"event": "progress", "phase": "tokenize", "done": 1048576, "total": 2097152}
    {"event": "report", "report": {...}}                                  PrepareReport
    {"event": "error", "kind": "DataError", "cause": ..., "hint": ..., "exit_code": 2}
    {"event": "end"}                                                      always the last line

OUT/data/data.json (DataIndex) names the stores and the row sets in use; it is written last, so a
crash leaves the old data or the new. Stores and rows are kept by content and are made once.
"""

from __future__ import annotations

import hashlib
import json
import resource
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from packmule.data.documents import Reading
from packmule.data.duplicates import find_duplicates, write_report
from packmule.data.files import disk_errors, write_text
from packmule.data.mixes import whole_weights
from packmule.data.model_files import prepare_model
from packmule.data.prepared import INDEX, DataIndex, ValidationIndex
from packmule.data.report import NamedRows, PrepareReport, PrepareRequest, SourceReport
from packmule.data.rows import POLICIES, Chosen, Rows, RowsMeta, validation_documents, write_rows
from packmule.data.sources import Hashes, Source, find_groups
from packmule.data.store import FORMAT, TokenStore
from packmule.data.template import ChatTemplate
from packmule.data.token_bytes import write_token_bytes
from packmule.data.tokenize import store_key, write_store
from packmule.data.tokenizer import TextTokenizer
from packmule.errors import ConfigError, DataError, PackmuleError
from packmule.spec.records import Record

Progress = Callable[[str, int, int], None]


def prepare(request: PrepareRequest, progress: Progress) -> PrepareReport:
    """Write OUT/model and OUT/data.

    Args:
        progress: called with (phase, done, total); phases are model, hash, duplicates, tokenize, pack.

    Raises:
        PackmuleError: see the modules that do the parts.
    """
    began = time.monotonic()
    out = Path(request.out)
    with disk_errors(out):
        (out / "data").mkdir(parents=True, exist_ok=True)
    progress("model", 0, 1)
    seed = request.seed if request.random_init else None
    chat_template = Path(request.chat_template).expanduser() if request.chat_template else None
    tokenizer = prepare_model(Path(request.model).expanduser(), out / "model", seed, chat_template)
    write_token_bytes(out / "model")
    progress("model", 1, 1)
    work = _Preparation(request, tokenizer, out / "data", progress)
    report = work.run()
    return report.model_copy(update={"seconds": time.monotonic() - began, "peak_ram_bytes": peak_ram_bytes()})


def reading_of(request: PrepareRequest, tokenizer: TextTokenizer) -> Reading:
    """How a request's files are read."""
    template = None
    if tokenizer.chat_template is not None:
        template = ChatTemplate(
            tokenizer.chat_template,
            tokenizer.special_variables,
            tokenizer.specials,
            tokenizer.template_file or tokenizer.source,
        )
    return Reading(request.format, request.columns, request.train_on == "all", template, tokenizer.vocab)


class _Preparation:
    """From files to stores and rows."""

    def __init__(
        self, request: PrepareRequest, tokenizer: TextTokenizer, folder: Path, progress: Progress
    ) -> None:
        self.request, self.tokenizer, self.folder, self.progress = request, tokenizer, folder, progress
        self.reading = reading_of(request, tokenizer)
        self.hashes = Hashes(folder / "hashes.json")
        self.reused = True
        self.duplicates: Path | None = None

    def run(self) -> PrepareReport:
        """Everything; data.json last."""
        request = self.request
        groups = self._hash(request.dataset)
        names = [named.name for named in request.validation]
        held_out = [self._hash(named.dataset) for named in request.validation]
        self.hashes.save()
        store = self._store(groups, request.deduplicate)
        train, validation = self._pack(store, request, len(groups))
        for name, files in zip(names, held_out, strict=True):
            other = self._store(files, None)
            rows = self._rows(other, [self._chosen(other, np.ones(other.meta.documents, bool))], name)
            validation.append((name, other, rows))
        index = DataIndex(
            store=store.folder.name,
            train=train.folder.name,
            validation=tuple(
                ValidationIndex(name=name, store=other.folder.name, rows=rows.folder.name)
                for name, other, rows in validation
            ),
        )
        write_text(self.folder / INDEX, index.to_json())
        return PrepareReport(
            documents=store.meta.documents,
            tokens=store.meta.tokens,
            sources=self._sources(groups, store, train.meta),
            train=train.meta,
            validation=tuple(NamedRows(name=name, rows=rows.meta) for name, _, rows in validation),
            train_fill_percent=100 * train.meta.fill,
            reused=self.reused,
            duplicates=None if self.duplicates is None else str(self.duplicates),
            sample_ids=_prompt_ids(self.tokenizer, request.sample_prompt),
            seconds=0.0,
            peak_ram_bytes=None,
        )

    def _hash(self, dataset: Sequence[str]) -> list[list[Source]]:
        groups = find_groups(dataset)
        total, hashed = sum(path.stat().st_size for group in groups for path in group), 0

        def count(block: int) -> None:
            nonlocal hashed
            hashed += block
            self.progress("hash", hashed, total)

        return [[self.hashes.of(path, count) for path in group] for group in groups]

    def _store(self, groups: list[list[Source]], similarity: float | None) -> TokenStore:
        key = store_key(self.tokenizer, groups, self.reading, similarity)
        target = self.folder / f"tokens-{key[:16]}"
        report = self.folder / f"duplicates-{key[:16]}.jsonl"
        self.duplicates = self.duplicates if similarity is None else report
        if (target / "meta.json").exists():
            try:
                store = TokenStore(target)
            except PackmuleError:
                pass  # damaged or of another version: made again below
            else:
                if store.meta.key == key and store.meta.format == FORMAT:
                    return store
                store.close()
        self.reused = False
        total = sum(source.bytes for group in groups for source in group)
        dropped: set[int] = set()
        if similarity is not None:
            found = find_duplicates(
                groups,
                self.reading,
                similarity,
                self.folder,
                lambda done: self.progress("duplicates", done, total),
            )
            write_report(report, found, similarity)
            dropped = {document.place for document in found}
        write_store(
            target, self.tokenizer, groups, lambda done: self.progress("tokenize", done, total), self.reading,
            similarity, dropped,
        )  # fmt: skip
        return TokenStore(target)

    def _pack(
        self, store: TokenStore, request: PrepareRequest, entries: int
    ) -> tuple[Rows, list[tuple[str, TokenStore, Rows]]]:
        """The training rows, and the validation set that is held out of the same store, if any."""
        documents = store.meta.documents
        self.progress("pack", 0, documents)
        validation: list[tuple[str, TokenStore, Rows]] = []
        if request.validation_only:
            every = self._rows(store, [self._chosen(store, np.ones(documents, bool))])
            return every, [("validation", store, every)]
        share = 0.0 if request.validation else request.val_size
        held_out = validation_documents(documents, share, request.seed)
        train = self._rows(store, self._groups(store, ~held_out, entries))
        if held_out.any():
            rows = self._rows(store, [self._chosen(store, held_out)], "what data.val_size holds out")
            validation.append(("validation", store, rows))
        self.progress("pack", documents, documents)
        return train, validation

    def _groups(self, store: TokenStore, chosen: np.ndarray, entries: int) -> list[Chosen]:
        """One group of rows, or with weights one per entry."""
        if not self.request.weights:
            return [self._chosen(store, chosen)]
        weights = whole_weights(self.request.weights)
        entry_of = np.repeat(
            np.array([run.entry for run in store.meta.runs]), [run.documents for run in store.meta.runs]
        )
        groups = []
        for entry, weight in enumerate(weights):
            if not (chosen & (entry_of == entry)).any():
                raise DataError(
                    f"{self.request.dataset[entry]} has a weight in `data.path` and no document to train on.",
                    "leave it out, or hold less out with data.val_size",
                )
            groups.append(self._chosen(store, chosen & (entry_of == entry), weight))
        return groups

    def _chosen(self, store: TokenStore, chosen: np.ndarray, weight: int = 0) -> Chosen:
        """Documents (bool [documents]), each with what is done where it is too long."""
        asked = self.request.long_documents
        masked = POLICIES.index("truncate" if asked == "auto" else asked)
        plain = POLICIES.index("split" if asked == "auto" else asked)
        policies = np.repeat(
            np.array([masked if run.masked else plain for run in store.meta.runs], np.uint8),
            [run.documents for run in store.meta.runs],
        )
        return Chosen(np.flatnonzero(chosen), policies[chosen], weight)

    def _rows(self, store: TokenStore, groups: Sequence[Chosen], name: str = "the data") -> Rows:
        """Rows of these documents, made where they are not there already; `name` is for messages."""
        length = self.request.max_seq_length
        digest = hashlib.sha256(json.dumps([store.meta.key, length]).encode())
        for group in groups:
            digest.update(str(group.weight).encode())
            digest.update(group.documents.tobytes())
            digest.update(group.policies.tobytes())
        key = digest.hexdigest()
        target = self.folder / f"rows-{key[:16]}"
        if (target / "meta.json").exists():
            try:
                rows = Rows(target)
            except PackmuleError:
                pass  # damaged or of another version: made again below
            else:
                if rows.meta.key == key:
                    return rows
                rows.close()
        write_rows(target, store, groups, length, key, name)
        return Rows(target)

    def _sources(
        self, groups: list[list[Source]], store: TokenStore, train: RowsMeta
    ) -> tuple[SourceReport, ...]:
        weights = self.request.weights
        return tuple(
            SourceReport(
                path=path,
                weight=weights[i] if weights else None,
                files=len(groups[i]),
                bytes=sum(source.bytes for source in groups[i]),
                held=store.meta.entries[i],
                rows=train.groups[i].rows if train.groups else None,
            )
            for i, path in enumerate(self.request.dataset)
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


def _limit(ram_bytes: int | None) -> None:
    """Let this process allocate no more than that."""
    if ram_bytes is not None:
        resource.setrlimit(resource.RLIMIT_DATA, (ram_bytes, ram_bytes))


def main(
    arguments: list[str],
    stdin: TextIO,
    stdout: TextIO,
    work: Callable[[PrepareRequest, Progress], Record] = prepare,
) -> int:
    """The command: returns the exit code.

    Args:
        work: from a request to the report that is printed.
    """
    lines = _Lines(stdout)
    try:
        text = arguments[0] if arguments else stdin.read()
        request = PrepareRequest.parse_json(text, "prepare request")
        _limit(request.ram_bytes)
        try:
            report = work(request, lines)
        except MemoryError:
            raise ConfigError(
                "Preparing the data takes more memory than the budget leaves.",
                "raise --ram; a record is read whole, so split what is very long",
            ) from None
        lines.write({"event": "report", "report": report.model_dump(mode="json")})
    except PackmuleError as error:
        fields = {"kind": type(error).__name__, "cause": error.cause, "hint": error.hint}
        lines.write({"event": "error", **fields, "exit_code": error.exit_code})
        return error.exit_code
    finally:
        lines.write({"event": "end"})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], sys.stdin, sys.stdout))
