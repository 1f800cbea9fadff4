"""Whatever bytes a data file holds, reading it gives documents or one DataError that names the file."""

from __future__ import annotations

import csv
import gzip
import io
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import zstandard
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.unit.data.chats import CHATML
from tests.unit.data.samples import SPECIALS

from packmule.data.documents import Marked, Numbered, Reading, Tally, documents
from packmule.data.formats import FORMATS
from packmule.data.sources import hash_file
from packmule.data.template import ChatTemplate
from packmule.data.text import Piece
from packmule.errors import DataError

VOCAB = 100
TEMPLATE = ChatTemplate(CHATML, {}, SPECIALS, Path("model"))
COLUMNS = sorted({name for format in FORMATS for name in (*format.required, *format.optional)} | {"other"})

scalars = st.one_of(
    st.none(), st.booleans(), st.integers(-3, VOCAB + 3), st.integers(), st.floats(), st.text(max_size=20)
)
message = st.dictionaries(st.sampled_from(["role", "content", "from", "value", "tool_calls"]), st.one_of(
    st.sampled_from(["user", "assistant", "system", "human", "gpt", "tool", "x"]), scalars,
    st.lists(st.dictionaries(st.sampled_from(["type", "text"]), scalars, max_size=2), max_size=2),
), max_size=4)  # fmt: skip
ids = st.lists(st.integers(0, VOCAB), max_size=6)
pairs = st.lists(st.lists(st.text(max_size=5), max_size=3), max_size=3)
values = st.one_of(scalars, st.lists(message, max_size=4), ids, st.lists(scalars, max_size=4), pairs, message)
records = st.lists(st.dictionaries(st.sampled_from(COLUMNS), values, max_size=5), max_size=4)
names = st.sampled_from(
    ["a.jsonl", "a.json", "a.csv", "a.tsv", "a.txt", "a.parquet", "a.jsonl.gz", "a.json.zst", "a.txt.gz"]
)


def check(name: str, content: bytes, reading: Reading) -> None:
    """Read the file; documents must be fit for what follows."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, name)
        path.write_bytes(content)
        source = hash_file(path, lambda done: None)
        try:
            found = list(documents(source, reading, Tally()))
        except DataError as error:
            assert str(path) in error.cause and error.hint
            return
    for document in found:
        if isinstance(document, Numbered):
            ids, trained = document.tokens
            assert ids.size and ids.dtype == np.int64 and 0 <= ids.min() <= ids.max() < VOCAB
            assert trained is None or trained.shape == ids.shape
        elif isinstance(document, Marked):
            assert document.text.encode()
            ends = [place for span in document.trained for place in span]
            assert ends == sorted(ends) and (not ends or 0 <= ends[0] <= ends[-1] <= len(document.text))
        else:
            assert isinstance(document, Piece) and document.text.encode() is not None


readings = st.builds(
    lambda template, everything: Reading(template=template, train_on_all=everything, vocab=VOCAB),
    st.sampled_from([None, TEMPLATE]),
    st.booleans(),
)


@settings(max_examples=100, deadline=None)
@given(name=names, content=st.binary(max_size=300), reading=readings)
@example(name="a.json", content=b"[" * 5000, reading=Reading())
@example(name="a.csv", content=b"text\n\x00\n", reading=Reading())
@example(name="a.csv", content=b"text\ra\rb", reading=Reading())
@example(name="a.parquet", content=b"PAR1" + bytes(40) + b"PAR1", reading=Reading())
@example(name="a.jsonl.gz", content=b"\x1f\x8b\x08" + bytes(30), reading=Reading())
def test_any_bytes_are_documents_or_one_error(name: str, content: bytes, reading: Reading) -> None:
    check(name, content, reading)


@settings(max_examples=150, deadline=None)
@given(found=records, container=st.sampled_from(["lines", "json", "csv"]), reading=readings)
def test_any_records_are_documents_or_one_error(
    found: list[dict[str, Any]], container: str, reading: Reading
) -> None:
    if container == "lines":
        check("a.jsonl", "\n".join(map(json.dumps, found)).encode(), reading)
        check("a.jsonl.zst", zstandard.compress("\n".join(map(json.dumps, found)).encode()), reading)
    elif container == "json":
        check("a.json", json.dumps(found).encode(), reading)
        check("a.json.gz", gzip.compress("".join(map(json.dumps, found)).encode()), reading)
    else:
        text = io.StringIO()
        writer = csv.DictWriter(text, COLUMNS, extrasaction="ignore")
        writer.writeheader()
        for record in found:
            cells = {k: v if isinstance(v, str) else json.dumps(v) for k, v in record.items()}
            writer.writerow(cells)
        check("a.csv", text.getvalue().encode(errors="replace"), reading)
