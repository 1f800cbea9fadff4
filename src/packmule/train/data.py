"""A job's data: what the preparing child is asked, and what of its report people are shown. No torch."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from packmule.data.report import NamedData, PrepareReport, PrepareRequest, PreviewReport, SourceReport
from packmule.data.store import FormatReport
from packmule.errors import PackmuleError
from packmule.plan.table import Row, Table
from packmule.spec.environment import Environment
from packmule.spec.job import Job
from packmule.train.folder import RunFolder
from packmule.train.situation import model_folder
from packmule.train.watch import run_child

LEAST_BYTES = 256 << 20
"""What the preparing child may always allocate: a budget below that is refused by the planner, not here."""

SHOWN_CHARACTERS = 240
SHOWN_SEGMENTS = 6


def prepare_request(job: Job, out: Path, ram_bytes: int | None = None) -> PrepareRequest:
    """What a job asks of data preparation."""
    data = job.data
    return PrepareRequest(
        model=str(model_folder(job.model.source)),
        dataset=data.paths,
        weights=data.weights,
        format=data.format,
        columns=data.columns,
        train_on=data.train_on,
        chat_template=data.chat_template,
        long_documents=data.long_documents,
        deduplicate=data.deduplicate,
        max_seq_length=job.train.max_seq_length,
        val_size=data.held_out,
        validation=tuple(NamedData(name=found.name, dataset=found.path) for found in data.val_path),
        seed=job.train.seed,
        out=str(out),
        random_init=job.model.init == "random" or RunFolder.at(Path(job.model.source)) is not None,
        sample_prompt=job.train.sample_prompt or "",
        ram_bytes=None if ram_bytes is None else max(ram_bytes, LEAST_BYTES),
    )


def preview_data(job: Job, environment: Environment) -> PreviewReport | str:
    """The formats of a job's data and an example of each, or why there are none. Planning goes on without."""
    if not job.data.path:
        return "no data is named"
    found: dict[str, Any] = {}

    def note(event: dict[str, Any]) -> None:
        if event["event"] == "report":
            found.update(event["report"])

    try:
        request = prepare_request(job, Path(job.train.output_dir))
        run_child("packmule.data.preview", request.model_dump_json(), note, environment.of_child())
        return PreviewReport.parse(found, "the data preview")
    except PackmuleError as error:
        return f"{error.cause.removesuffix('.')}; {error.hint}" if error.hint else error.cause


def preview_tables(preview: PreviewReport | str) -> list[Table]:
    """What `plan` shows of the data."""
    if isinstance(preview, str):
        return [Table("data", (("not read", preview),))]
    rows = tuple((_name(source), _held(source)) for source in preview.sources)
    return [Table("data", rows), *_examples(preview.sources)]


def data_tables(report: PrepareReport) -> list[Table]:
    """What `train` shows of the data: totals, sources, what was left out, an example of each format."""
    train = report.train
    trained = sum(source.held.trained for source in report.sources)
    loss = "" if trained == report.tokens else f", {trained / report.tokens:.0%} of them with loss"
    rows: list[Row] = [
        ("documents", f"{report.documents:,}, {report.tokens:,} tokens{loss}"),
        *((_name(source), f"{_held(source)}{_left_out(source)}") for source in report.sources),
        *_mix(report),
        (
            "training rows",
            f"{train.rows:,} of at most {train.max_seq_length} tokens, "
            f"{report.train_fill_percent:.1f} % full",
        ),
        *_long(report),
    ]
    held_out = [f"{found.rows.rows:,} rows ({found.name})" for found in report.validation]
    rows.append(("held out", ", ".join(held_out) or "nothing"))
    if report.duplicates:
        rows.append(("duplicates", f"listed in {report.duplicates}"))
    return [Table("data", tuple(rows)), *_examples(report.sources)]


def _name(source: SourceReport) -> str:
    return Path(source.path).name or source.path


def _held(source: SourceReport) -> str:
    """Files and formats of a source, with what they hold where that is known."""
    parts = []
    for found in source.held.formats:
        named = f" ({', '.join(found.columns[:6])})" if found.columns else ""
        files = f"{found.files} files, " if found.files > 1 else ""
        counted = f", {found.documents:,} documents" if found.documents else ""
        loss = f", {found.trained / found.tokens:.0%} with loss" if found.trained < found.tokens else ""
        parts.append(f"{files}{found.format}{named}{counted}{loss}")
    return "; ".join(parts) or "nothing"


def _left_out(source: SourceReport) -> str:
    held = source.held
    counts = {
        "empty": held.empty,
        "without anything to learn": held.unanswered,
        "near-duplicates": held.duplicates,
    }
    parts = [f"{count:,} {what}" for what, count in counts.items() if count]
    text = f"; left out: {', '.join(parts)}" if parts else ""
    if held.tools:
        text += f"; tools: definitions left out, calls read as text ({held.tools:,} documents)"
    return text


def _mix(report: PrepareReport) -> Iterable[Row]:
    """Shares of the rows, and how often a source is seen while the rows of all are counted once."""
    train = report.train
    total = sum(group.weight for group in train.groups)
    for source, group in zip(report.sources, train.groups, strict=False):
        seen = train.rows * group.weight / total / group.rows
        share = f"{group.weight} of {total} rows ({group.weight / total:.1%})"
        yield f"mix: {_name(source)}", f"{share}, of {group.rows:,}; seen {seen:.2f} times an epoch"


def _long(report: PrepareReport) -> Iterable[Row]:
    """What happened to documents longer than a row."""
    train, parts = report.train, list[str]()
    if train.documents_cut:
        parts.append(f"{train.documents_cut:,} cut to rows")
    if train.documents_left_out:
        parts.append(f"{train.documents_left_out:,} left out")
    if train.tokens_left_out:
        parts.append(f"{train.tokens_left_out:,} tokens left out (data.long_documents: split keeps them)")
    if train.pieces_masked:
        parts.append(f"{train.pieces_masked:,} pieces without loss left out")
    if parts:
        yield "longer than a row", ", ".join(parts)


def _examples(sources: Sequence[SourceReport]) -> list[Table]:
    return [_example(found) for source in sources for found in source.held.formats if found.example]


def _example(found: FormatReport) -> Table:
    shown = found.example[:SHOWN_SEGMENTS]
    rows = tuple(("loss" if part.loss else "no loss", _quoted(part.text)) for part in shown)
    notes = ("...",) if len(found.example) > len(shown) else ()
    return Table(f"example: {Path(found.file).name} as {found.format}", rows, notes=notes)


def _quoted(text: str) -> str:
    if len(text) > SHOWN_CHARACTERS:
        half = SHOWN_CHARACTERS // 2
        text = f"{text[:half]} ... {text[-half:]}"
    return json.dumps(text, ensure_ascii=False)[1:-1].replace('\\"', '"')
