"""`python -m packmule.data.preview`: what data looks like, before a run. Nothing is written.

Takes the request of packmule.data.prepare and prints lines like it; the report is a PreviewReport.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from packmule.data.documents import Reading, Tally, documents, format_of
from packmule.data.encode import encode, example
from packmule.data.model_files import read_tokenizer
from packmule.data.prepare import Progress, main, reading_of
from packmule.data.report import PrepareRequest, PreviewReport, SourceReport
from packmule.data.sources import Source, find_groups
from packmule.data.store import EntryReport, FormatReport
from packmule.data.tokenizer import TextTokenizer

MOST_FILES = 32
"""Files of an entry whose formats are looked at."""


def preview(request: PrepareRequest, progress: Progress) -> PreviewReport:
    """The formats of the data and the first document of each.

    Raises:
        DataError: files that cannot be found, or a first record that cannot be used.
    """
    template = Path(request.chat_template).expanduser() if request.chat_template else None
    tokenizer = read_tokenizer(Path(request.model).expanduser(), template)
    reading = reading_of(request, tokenizer)
    groups = find_groups(request.dataset)
    progress("preview", 0, len(groups))
    sources = []
    for i, (path, files) in enumerate(zip(request.dataset, groups, strict=True)):
        sizes = [file.stat() for file in files]
        stats = [Source(f, s.st_size, s.st_mtime_ns, "") for f, s in zip(files, sizes, strict=True)]
        held = EntryReport(
            documents=0, tokens=0, trained=0, formats=_formats(stats[:MOST_FILES], reading, tokenizer)
        )
        weight = request.weights[i] if request.weights else None
        size = sum(source.bytes for source in stats)
        sources.append(SourceReport(path=path, weight=weight, files=len(files), bytes=size, held=held))
        progress("preview", i + 1, len(groups))
    return PreviewReport(sources=tuple(sources))


def _formats(
    sources: Sequence[Source], reading: Reading, tokenizer: TextTokenizer
) -> tuple[FormatReport, ...]:
    found: dict[str, FormatReport] = {}
    for source in sources:
        format, columns = format_of(source, reading)
        known = found.get(format.name)
        if known is not None and known.example:
            found[format.name] = known.model_copy(update={"files": known.files + 1})
            continue
        first = next(documents(source, reading, Tally()), None)
        segments = () if first is None else example(encode([first], tokenizer)[0], tokenizer)
        found[format.name] = FormatReport(
            format=format.name, files=1 + (known.files if known else 0), file=str(source.path),
            columns=columns, documents=0, tokens=0, trained=0, example=segments,
        )  # fmt: skip
    return tuple(found.values())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], sys.stdin, sys.stdout, preview))
