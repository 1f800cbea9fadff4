"""Containers: the same records come out of every kind of file, and what is wrong is named with its place."""

from __future__ import annotations

import csv
import gzip
import io
import json
import random
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as arrow
import pyarrow.parquet as parquet
import pytest
import zstandard
from tests.unit.data.samples import random_text

from packmule.data.records import read_records
from packmule.data.sources import Source, hash_file
from packmule.data.streams import BLOCK_BYTES, open_stream
from packmule.errors import DataError

Records = list[dict[str, Any]]


def source(path: Path) -> Source:
    return hash_file(path, lambda done: None)


def lines(records: Records) -> bytes:
    return b"\n\n".join(json.dumps(record, ensure_ascii=False).encode() for record in records)


def array(records: Records) -> bytes:
    return json.dumps(records, indent=2).encode()


def stream(records: Records) -> bytes:
    return "\n".join(json.dumps(record, indent=1) for record in records).encode()


def table(records: Records, delimiter: str = ",") -> bytes:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(records[0]), delimiter=delimiter)
    writer.writeheader()
    writer.writerows(records)
    return text.getvalue().encode()


def arrow_bytes(records: Records) -> bytes:
    out = io.BytesIO()
    parquet.write_table(arrow.Table.from_pylist(records), out, row_group_size=70)
    return out.getvalue()


WRITERS = {
    "a.jsonl": lines,
    "a.ndjson": lines,
    "a.json": array,
    "b.json": stream,
    "a.csv": table,
    "a.tsv": lambda records: table(records, "\t"),
    "a.parquet": arrow_bytes,
}


def compressed(name: str, content: bytes) -> dict[str, bytes]:
    """The file, and what it becomes under both compressions, in two members or frames."""
    half = len(content) // 2
    parts = (content[:half], content[half:])
    if name.endswith(".parquet"):
        return {name: content}
    zstd = zstandard.ZstdCompressor()
    return {
        name: content,
        f"{name}.gz": b"".join(gzip.compress(part, 1) for part in parts),
        f"{name}.zst": b"".join(map(zstd.compress, parts)),
    }


@pytest.mark.parametrize("name", WRITERS)
def test_every_container_gives_the_same_records(name: str, tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    # the long one is more than a block, and the whole more than the JSON reader takes at once
    sizes = [*(rng.randrange(0, 200) for _ in range(300)), BLOCK_BYTES // 2]
    records: Records = [
        {"text": random_text(rng, size).replace("\x00", "").replace("\r", ""), "other": str(i)}
        for i, size in enumerate(sizes)
    ]
    assert max(len(record["text"]) for record in records) > BLOCK_BYTES
    for file, content in compressed(name, WRITERS[name](records)).items():
        path = tmp_path / file
        path.write_bytes(content)
        found = list(read_records(source(path)))
        assert [record.value for record in found] == records, file
        ends = [record.end for record in found]
        assert ends == sorted(ends) and ends[-1] == len(content), file


def test_a_byte_order_mark_is_no_part_of_the_first_record(tmp_path: Path) -> None:
    records: Records = [{"text": "é"}, {"text": "b"}]
    for name in ("a.jsonl", "a.json", "b.json", "a.csv"):
        (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + WRITERS[name](records))
        assert [record.value for record in read_records(source(tmp_path / name))] == records, name


def test_places_are_lines_and_rows(tmp_path: Path) -> None:
    records: Records = [{"text": "a\nb"}, {"text": "c"}]
    expected = {
        "a.jsonl": ["line 1", "line 3"], "a.json": ["line 2", "line 5"], "b.json": ["line 1", "line 4"],
        "a.csv": ["line 3", "line 4"], "a.parquet": ["row 1", "row 2"],
    }  # fmt: skip
    for name, places in expected.items():
        (tmp_path / name).write_bytes(WRITERS[name](records))
        assert [record.place for record in read_records(source(tmp_path / name))] == places, name


@pytest.mark.parametrize(("name", "content", "message"), [
    ("a.json", b'[{"text": "a"}\n', "line 2 is not JSON: the array has no end"),
    ("a.json", b'[{"text": "a"},\n]', "line 2 is not JSON: a record is missing"),
    ("a.json", b'[{"text": "a"}\n{"text": "b"}]', "line 2 is not JSON: a comma is missing"),
    ("a.json", b'[{"text": "a"}]\n{}', "line 2 is not JSON: something follows"),
    ("a.json", b'[\n{"text": "a}]', "line 2 is not JSON: Unterminated string"),
    ("a.json", b'[\n{"text": nope}, {}]', "line 2 is not JSON: Expecting value"),
    ("a.json", b'[\n1]', "line 2 is not a JSON object"),
    ("a.json", b'{"text": "a"}\n[1]', "line 2 is not a JSON object"),
    ("a.json", b"[" * 100_000, "is not a JSON object|too deeply nested"),
    ("a.json", b'{"a": ' + b"[" * 100_000, "too deeply nested"),
    ("a.json", b'[{"text": "\xff"}]', "byte 11 cannot"),
    ("a.jsonl", b'{"a": ' + b"[" * 100_000, "line 1 is not JSON"),
    ("a.csv", b"text,b\na,b\nc\n", "line 3 has 1 fields, and the first line names 2"),
    ("a.csv", b'text\n"a"b\n', "line 2 is not CSV"),
    ("a.csv", b'text\n"a\n\n', "line 3 is not CSV"),
    ("a.csv", b"text,text\na,b\n", "names the column 'text' twice"),
    ("a.csv", b"text\n\xff\n", "byte 5 cannot"),
    ("a.parquet", b"PAR1 nothing of the kind PAR1", "not a Parquet file"),
    ("a.parquet", b"", "not a Parquet file"),
    ("a.jsonl.gz", gzip.compress(b'{"text": "a"}\n' * 999)[:-20], "damaged or ends early"),
    ("a.jsonl.gz", b"plain", "damaged or ends early"),
    ("a.txt.zst", zstandard.compress(b"word " * 99_999)[:-3], "damaged or ends early"),
    ("a.jsonl.zst", b"plain", "damaged or ends early"),
])  # fmt: skip
def test_what_is_wrong_is_named(name: str, content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        if name.startswith("a.txt"):
            with open_stream(source(path)) as opened:
                list(opened.text())
        else:
            list(read_records(source(path)))
    assert str(path) in caught.value.cause and caught.value.hint


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst", "a.parquet"])
def test_a_file_cut_or_changed_anywhere_is_an_error_or_gives_records(
    name: str, tmp_path: Path, seed: int
) -> None:
    rng = random.Random(seed)
    records: Records = [{"text": random_text(rng, 30)} for _ in range(200)]
    plain = name.removesuffix(".zst").removesuffix(".gz")
    whole = compressed(plain, WRITERS[plain](records))[name]
    path = tmp_path / name
    for turn in range(60):
        at = rng.randrange(len(whole))
        flipped = whole[:at] + bytes([whole[at] ^ 1 << rng.randrange(8)]) + whole[at + 1 :]
        path.write_bytes(whole[:at] if turn % 2 else flipped)
        try:
            found = [record.value for record in read_records(source(path))]
        except DataError as error:
            assert str(path) in error.cause
        else:
            assert turn % 2 == 0 or not at, "a file that was cut was read as if it were whole"
            assert len(found) <= len(records)


MEASURE = """
import sys
from pathlib import Path
from packmule.data.prepare import peak_ram_bytes
from packmule.data.records import read_records
from packmule.data.sources import hash_file
path = Path(sys.argv[1])
next(read_records(hash_file(path, lambda n: None)))  # the libraries
before = peak_ram_bytes()
print(sum(1 for _ in read_records(hash_file(path, lambda n: None))), peak_ram_bytes() - before)
"""


@pytest.mark.parametrize("name", ["a.json", "b.json", "a.csv", "a.parquet", "a.jsonl.zst", "a.jsonl.gz"])
def test_reading_a_container_takes_no_more_than_blocks(name: str, tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    count = 32_000 if name == "a.parquet" else 8_000
    texts = [random_text(rng, 400).replace("\x00", "").replace("\r", "") for _ in range(50)]
    records: Records = [{"text": rng.choice(texts) + str(i)} for i in range(count)]
    plain = name.removesuffix(".zst").removesuffix(".gz")
    content = WRITERS[plain](records)
    path = tmp_path / name
    path.write_bytes(content if plain == name else compressed(plain, content)[name])
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(path)], check=True, capture_output=True, text=True
    )
    found, grown = map(int, done.stdout.split())
    size = sum(len(record["text"]) for record in records)
    print(f"{size >> 20} MiB: {grown >> 20} MiB more")
    assert found == len(records)
    assert size > 8 << 20
    assert grown < size // 2


def test_a_small_file_that_unpacks_to_much_is_read_in_blocks(tmp_path: Path) -> None:
    for name, content in (
        ("a.txt.gz", gzip.compress(bytes(1 << 27), 1)),
        ("a.txt.zst", zstandard.compress(bytes(1 << 27))),
    ):
        path = tmp_path / name
        path.write_bytes(content)
        limit = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        with open_stream(source(path)) as opened:
            assert sum(map(len, opened.text())) == 1 << 27
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - limit
        assert grown * 1024 < 80 << 20, name
