"""HEAD.json, slots and token stores as nobody should write them: errors of ours, no hang, no large memory."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from known_run import BLOCKS, LAYOUT, progress
from malformed import examples, outcome, spoiled, twisted

from packmule.checkpoint.head import HEAD_NAME, BlockHead, Head, encode, seal
from packmule.checkpoint.reader import StateReader
from packmule.data.rows import Chosen, Rows, write_rows
from packmule.data.store import TokenStore
from packmule.kernels import checksum
from packmule.tiers.disk import PosixDisk, aligned_buffer

CRC = checksum()


def good_head() -> dict[str, Any]:
    blocks = tuple(
        BlockHead(slot=0, checksums=("0" * 8 * LAYOUT.pieces(i),) * len(LAYOUT.planes))
        for i in range(len(BLOCKS))
    )
    head = Head(**progress(3).model_dump(), layout=LAYOUT.record(), blocks=blocks)
    found: dict[str, Any] = json.loads(encode(seal(head, CRC)))
    return found


def sealed(record: Any) -> bytes:
    """A record as HEAD.json with the checksum that fits it, so that the content itself is judged."""
    text = json.dumps(record, indent=2)
    if isinstance(record, dict):
        kept = {key: value for key, value in record.items() if key != "checksum"}
        text = json.dumps({**kept, "checksum": "00000000"}, indent=2)
    data = text.encode("utf-8", "surrogatepass") + b"\n"
    found = f'"checksum": "{CRC(memoryview(data)):08x}"'.encode()
    return data.replace(b'"checksum": "00000000"', found)


def read_state(folder: Path) -> None:
    """Open a run's state and read it all; the planes are zeros and do not match: an error of ours."""
    with StateReader.open(PosixDisk(), folder, CRC) as reader:
        reader.verify(aligned_buffer(reader.layout.chunk_bytes))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "state.bin").write_bytes(bytes(LAYOUT.bytes))
    (tmp_path / HEAD_NAME).write_bytes(sealed(good_head()))
    return tmp_path


def test_the_whole_head_is_read_and_its_planes_judged(run: Path) -> None:
    assert "is damaged: checksum stored 00000000" in outcome(lambda: read_state(run))


def test_damaged_heads_end_in_errors_of_ours(run: Path, seed: int, long: bool) -> None:
    data = (run / HEAD_NAME).read_bytes()

    def check(case: bytes) -> None:
        (run / HEAD_NAME).write_bytes(case)
        assert outcome(lambda: read_state(run)) != "read"

    examples(spoiled(data, len(data)), check, 2000 if long else 100, seed)


def test_twisted_heads_with_a_right_checksum_end_in_errors_of_ours(run: Path, seed: int, long: bool) -> None:
    def check(case: Any) -> None:
        (run / HEAD_NAME).write_bytes(sealed(case))
        outcome(lambda: read_state(run))

    examples(twisted(good_head()), check, 5000 if long else 200, seed)


@pytest.mark.parametrize("change", [
    {"chunk_bytes": 1 << 60}, {"chunk_bytes": -4096}, {"chunk_bytes": 0}, {"slots": 3}, {"slots": 0},
    {"bytes": 1 << 60}, {"bytes": -1}, {"planes": []}, {"dtype": "float16"}, {"blocks": []},
])  # fmt: skip
def test_a_layout_of_impossible_size_is_refused(change: dict[str, Any], run: Path) -> None:
    head = good_head()
    head["layout"].update(change)
    (run / HEAD_NAME).write_bytes(sealed(head))
    assert outcome(lambda: read_state(run)) != "read"


@pytest.mark.parametrize("shape", [[1 << 60], [1 << 40, 1 << 40], [-4, 8], [0], [], [4.5], ["x"], None, True])
def test_a_tensor_of_impossible_shape_is_refused(shape: Any, run: Path) -> None:
    head = good_head()
    head["layout"]["blocks"][1]["tensors"][1]["shape"] = shape
    (run / HEAD_NAME).write_bytes(sealed(head))
    assert outcome(lambda: read_state(run)) != "read"


@pytest.mark.parametrize("text", [b"", b"\n", b"null\n", b"[" * 100_000, b"\xff" * 100])
def test_a_head_that_is_no_record_is_refused(text: bytes, run: Path) -> None:
    (run / HEAD_NAME).write_bytes(text)
    assert HEAD_NAME in outcome(lambda: read_state(run))


@pytest.mark.parametrize("length", [0, 1, 4096, LAYOUT.bytes - 1, LAYOUT.bytes + 1])
def test_a_state_of_another_length_is_refused(length: int, run: Path) -> None:
    (run / "state.bin").write_bytes(bytes(length))
    assert "state.bin" in outcome(lambda: read_state(run))


# the token store and its rows

VOCAB, DOCUMENTS = 50, 12


@pytest.fixture
def data(tmp_path: Path, seed: int) -> Path:
    """A folder with store/ and rows/, written by hand and by `write_rows`."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(2, 9, DOCUMENTS)
    store = tmp_path / "store"
    store.mkdir()
    bounds = np.concatenate([[0], np.cumsum(lengths)]).astype("<i8")
    bounds.tofile(store / "documents.bin")
    rng.integers(0, VOCAB, bounds[-1]).astype("<u2").tofile(store / "tokens.bin")
    meta = {
        "format": 1, "key": "k", "dtype": "<u2", "vocab": VOCAB, "tokenizer_sha256": "t", "add_bos": False,
        "bos": None, "eos": 0, "sources": [], "documents": DOCUMENTS, "tokens": int(bounds[-1]),
    }  # fmt: skip
    (store / "meta.json").write_text(json.dumps(meta))
    every = Chosen(np.arange(DOCUMENTS), np.zeros(DOCUMENTS, np.uint8))
    write_rows(tmp_path / "rows", TokenStore(store), [every], 16)
    assert outcome(lambda: read_data(tmp_path)) == "read"
    return tmp_path


def read_data(folder: Path) -> None:
    """All documents of a store, and all pieces of all rows."""
    store = TokenStore(folder / "store")
    for index in range(min(store.meta.documents, 100)):
        store.document(index)
    store.document_bounds()
    rows = Rows(folder / "rows")
    for row in range(min(len(rows), 100)):
        for start, length in rows.pieces(row):
            store.read(start, length)


@pytest.mark.parametrize("name", ["store/meta.json", "rows/meta.json"])
def test_twisted_data_records_end_in_errors_of_ours(name: str, data: Path, seed: int, long: bool) -> None:
    path = data / name
    good = json.loads(path.read_text())

    def check(case: Any) -> None:
        path.write_text(json.dumps(case))
        outcome(lambda: read_data(data))

    examples(twisted(good), check, 2000 if long else 60, seed)


@pytest.mark.parametrize(
    "name",
    ["store/documents.bin", "store/tokens.bin", "rows/rows.bin", "rows/pieces.bin", "rows/lengths.bin"],
)
def test_damaged_data_files_end_in_errors_of_ours(name: str, data: Path, seed: int, long: bool) -> None:
    path = data / name
    good = path.read_bytes()

    def check(case: bytes) -> None:
        path.write_bytes(
            case[: len(good)].ljust(len(good), b"\0")
        )  # of the right length: only its numbers lie
        outcome(lambda: read_data(data))

    examples(spoiled(good, len(good)), check, 1000 if long else 40, seed)


def test_a_store_that_cannot_be_opened_leaves_no_file_open(data: Path) -> None:
    def left_open() -> list[str]:
        links = (os.readlink(link) for link in Path("/proc/self/fd").iterdir() if link.is_symlink())
        return [path for path in links if path.startswith(str(data))]

    (data / "rows/rows.bin").write_bytes(b"short")
    assert "rows.bin has 5 bytes" in outcome(lambda: read_data(data))
    assert left_open() == []
    store = TokenStore(data / "store")
    assert len(left_open()) == 2
    store.close()
    assert left_open() == []
