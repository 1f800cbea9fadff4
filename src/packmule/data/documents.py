"""The documents of one file, ready for the tokenizer: text in pieces, marked text, or ids.

Where the container, the format and the chat template come together. What is left out is counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import NamedTuple

from packmule.data.formats import (
    BY_NAME,
    Completion,
    Conversation,
    Format,
    FormatReader,
    Sample,
    Tokens,
    guess,
    unknown_columns,
)
from packmule.data.records import Record, read_records
from packmule.data.sources import Source
from packmule.data.streams import open_stream
from packmule.data.template import ChatTemplate, Spans, TemplateRefused
from packmule.data.text import Piece, cut, cut_text
from packmule.errors import DataError


class Marked(NamedTuple):
    """A whole document whose loss lies on some of its characters.

    Attributes:
        text: all of it.
        trained: ranges of characters that carry loss.
        begin: it begins with the begin-of-text token, where the tokenizer has one.
        finish: it ends with the end-of-text token, which carries loss.
        said: its text without what a template adds, for finding duplicates.
        end: bytes of its file read so far.
    """

    text: str
    trained: Spans
    begin: bool
    finish: bool
    said: str
    end: int


class Numbered(NamedTuple):
    """A whole document that comes as ids; `end`: bytes of its file read so far."""

    tokens: Tokens
    end: int


Document = Piece | Marked | Numbered


@dataclass(frozen=True)
class Reading:
    """How files are read.

    Attributes:
        format: name of the format, or "auto".
        columns: our name of a column -> the files'.
        train_on_all: prompts and users' turns carry loss too.
        template: of the model, or None.
        vocab: ids are below this.
    """

    format: str = "auto"
    columns: Mapping[str, str] = field(default_factory=dict)
    train_on_all: bool = False
    template: ChatTemplate | None = None
    vocab: int = 1 << 31


@dataclass
class Files:
    """Files of one format: how many, and of the first its path and its first record's columns."""

    count: int
    first: str
    columns: tuple[str, ...]


@dataclass
class Tally:
    """What was found in the files of one entry.

    Attributes:
        empty: records without text.
        tools: documents whose tool definitions are left out, or whose tool calls are read as text.
        duplicates: documents left out because an earlier one resembles them.
        formats: by name.
    """

    empty: int = 0
    tools: int = 0
    duplicates: int = 0
    formats: dict[str, Files] = field(default_factory=dict)

    def found(self, format: str, path: str, columns: tuple[str, ...]) -> None:
        """Count a file."""
        self.formats.setdefault(format, Files(0, path, columns)).count += 1


def format_of(source: Source, reading: Reading) -> tuple[Format, tuple[str, ...]]:
    """The format of a file, forced or guessed from its first record, and that record's columns.

    Raises:
        DataError: no known format, or one that the file cannot have; as `read_records`.
    """
    asked = None if reading.format == "auto" else BY_NAME[reading.format]
    if source.kind.container == "text":
        if asked is not None and asked.name != "text":
            raise DataError(
                f"{source.path} is plain text, and data.format is {asked.name!r}.",
                "give records (.jsonl, .json, .csv, .parquet), or leave data.format out",
            )
        return BY_NAME["text"], ()
    first = next(read_records(source), None)
    if first is None:
        return asked or BY_NAME["text"], ()
    names = {theirs: ours for ours, theirs in reading.columns.items()}
    present = [names.get(key, key) for key, value in first.value.items() if value is not None]
    format = asked or guess(present)
    if format is None:
        raise unknown_columns(str(source.path), first.place, first.value)
    return format, tuple(first.value)


def documents(source: Source, reading: Reading, tally: Tally) -> Iterator[Document]:
    """The documents of one file, in order.

    Raises:
        DataError: names the file, and the line, row or byte that cannot be used.
    """
    if source.kind.container == "text":
        with open_stream(source) as stream:
            pieces = cut((text, stream.position()) for text in stream.text())
            first = next(pieces, None)
            tally.empty += first is None
            if first is not None:
                yield from chain([first], pieces)
        return
    format, _ = format_of(source, reading)
    chat = reading.template is not None
    reader = FormatReader(format, reading.columns, chat, reading.vocab, str(source.path))
    used = [reading.columns.get(name, name) for name in (*format.required, *format.optional)]
    make = partial(_documents_of, source, reading, tally)
    for record in read_records(source, used):
        yield from make(record, reader.read(record.value, record.place))


def _documents_of(
    source: Source, reading: Reading, tally: Tally, record: Record, sample: Sample
) -> Iterator[Document]:
    end = record.end
    if isinstance(sample, str):
        tally.empty += not sample
        yield from cut_text(sample, end)
    elif isinstance(sample, Tokens):
        tally.empty += not len(sample.ids)
        if len(sample.ids):
            yield Numbered(sample, end)
    elif isinstance(sample, Completion):
        text = sample.prompt + sample.completion
        tally.empty += not text
        if text:
            span = (0 if reading.train_on_all else len(sample.prompt), len(text))
            yield Marked(text, (span,), True, True, f"{sample.prompt}\n{sample.completion}", end)
    else:
        yield from _conversation(source, reading, tally, record, sample)


def _conversation(
    source: Source, reading: Reading, tally: Tally, record: Record, sample: Conversation
) -> Iterator[Document]:
    said = "\n".join(str(message["content"]) for message in sample.messages)
    if not said.strip():
        tally.empty += 1
        return
    if reading.template is None:
        raise DataError(
            f"{source.path}: {record.place} is a conversation, and the model has no chat template.",
            "name a template file: data.chat_template: FILE.jinja",
        )
    tally.tools += sample.tools
    try:
        rendered = reading.template.render(sample.messages)
    except TemplateRefused as error:
        raise DataError(
            f"{source.path}: {record.place}: the chat template of {reading.template.source} refuses this "
            f"conversation: {error}.",
            "correct the conversation, or name another template with data.chat_template",
        ) from None
    trained = ((0, len(rendered.text)),) if reading.train_on_all else rendered.trained
    if sample.prompt and not reading.train_on_all:
        answers = sum(message["role"] == "assistant" for message in sample.messages[sample.prompt :])
        trained = trained[len(trained) - answers :]
    answered = sample.messages[-1]["role"] == "assistant"
    yield Marked(rendered.text, trained, False, answered and not rendered.closed, said, record.end)
