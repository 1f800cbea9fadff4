"""Sources and the token store: every document's ids, in order; errors name the place."""

from __future__ import annotations

import json
import random
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tests.unit.data.samples import random_text

from packmule.data.gguf_tokenizer import tokenizer_from_gguf
from packmule.data.records import read_records
from packmule.data.sources import find_files, hash_file
from packmule.data.store import TokenStore
from packmule.data.text import PIECE_CHARACTERS
from packmule.data.tokenize import store_key, write_store
from packmule.data.tokenizer import TextTokenizer
from packmule.errors import DamagedFile, DataError, DiskError


@pytest.fixture
def tokenizer(byte_level: Callable[..., Path]) -> TextTokenizer:
    return tokenizer_from_gguf(byte_level("smollm", add_bos=True))


def nothing(done: int) -> None:
    """Takes progress and drops it."""


def build(folder: Path, tokenizer: TextTokenizer, *paths: Path) -> TokenStore:
    sources = [hash_file(path, nothing) for path in find_files([str(path) for path in paths])]
    write_store(folder, tokenizer, [sources], nothing)
    return TokenStore(folder)


def test_store_holds_each_document_between_bos_and_eos(
    tmp_path: Path, tokenizer: TextTokenizer, seed: int
) -> None:
    rng = random.Random(seed)
    long = random_text(rng, 30_000)
    texts = [random_text(rng, rng.randrange(0, 60)) for _ in range(300)] + [
        long,
        "",
        "é",
        random_text(rng, 9),
    ]
    assert len(long) > 2 * PIECE_CHARACTERS
    records = tmp_path / "b.jsonl"
    records.write_text(
        "\n\n".join(json.dumps({"id": 1, "text": t}) for t in texts), encoding="utf-8", newline=""
    )
    plain = tmp_path / "a.txt"
    plain.write_bytes(b"\xef\xbb\xbf" + long.encode())
    store = build(tmp_path / "store", tokenizer, records, plain)
    expected = [tokenizer.encode([text])[0] for text in [*filter(None, texts), long]]
    assert store.meta.documents == len(expected)
    for index, ids in enumerate(expected):
        assert store.document(index).tolist() == [tokenizer.bos, *ids, tokenizer.eos], index
    assert store.meta.tokens == sum(len(ids) + 2 for ids in expected)
    bounds = store.document_bounds()
    assert bounds[0] == 0 and bounds[-1] == store.meta.tokens
    assert store.read(5, 7).tolist() == np.fromfile(store.folder / "tokens.bin", "<u2")[5:12].tolist()


def test_key_follows_contents_and_tokenizer_but_not_names(
    tmp_path: Path, tokenizer: TextTokenizer, byte_level: Callable[..., Path]
) -> None:
    def key(name: str, text: str, used: TextTokenizer) -> str:
        path = tmp_path / name
        path.write_text(text)
        return store_key(used, [[hash_file(path, nothing)]])

    base = key("a.txt", "hello", tokenizer)
    assert key("b.txt", "hello", tokenizer) == base
    others = [key("a.txt", "hello!", tokenizer), key("a.jsonl", "hello", tokenizer)]
    others.append(key("a.txt", "hello", tokenizer_from_gguf(byte_level("gpt-2"))))
    assert len({base, *others}) == 4


def test_folders_and_globs_are_searched_in_order(tmp_path: Path) -> None:
    for name in ("b.txt", "a.md", "sub/c.jsonl", "sub/skip.png", ".hidden/d.txt", "z.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    names = [path.name for path in find_files([str(tmp_path)])]
    assert names == ["a.md", "b.txt", "c.jsonl", "z.jsonl"]
    chosen = ["z.jsonl", "*.[tm]*", "b.txt"]
    names = [path.name for path in find_files([str(tmp_path / name) for name in chosen])]
    assert names == ["z.jsonl", "a.md", "b.txt"]


@pytest.mark.parametrize(("name", "content", "message"), [
    ("a.txt", b"good " * 100_000 + b"\xff\xfe", "byte 500000 cannot"),
    ("a.txt", b"ab\xe2\x82", "byte 2 cannot"),
    ("a.jsonl", b'{"text": "a"}\n{"text": "\xff"}\n', "byte 24 cannot"),
    ("a.jsonl", b'{"text": "a"}\n\n{"txt": "b"}\n', 'line 3 has no "text" key .keys: .txt'),
    ("a.jsonl", b'{"text": "a"}\n{"text": 5}\n', 'line 2: "text" is not a string'),
    ("a.jsonl", b'{"text": "a"}\n[1]\n', "line 2 is not a JSON object"),
    ("a.jsonl", b'{"text": "a"', "line 1 is not JSON"),
    ("a.jsonl", b'{"text": "\\ud800"}', "line 1 holds a lone surrogate"),
    ("a.jsonl", b"\n\n", "no text"),
    ("a.txt", b"", "no text"),
    ("a.jsonl", b'{"text": ""}\n', "no text"),
])  # fmt: skip
def test_bad_data_is_named_and_leaves_no_store(
    name: str, content: bytes, message: str, tmp_path: Path, tokenizer: TextTokenizer
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        build(tmp_path / "out" / "store", tokenizer, tmp_path / name)
    assert name in caught.value.cause and caught.value.hint
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize(("dataset", "message"), [
    (["nowhere.txt"], "no such file"),
    (["empty"], "holds no file of a known kind"),
    (["a.png"], "not a known kind"),
    ([], "no dataset"),
])  # fmt: skip
def test_unusable_dataset_is_named(dataset: list[str], message: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "a.png").write_text("x")
    with pytest.raises(DataError, match=message):
        find_files([str(tmp_path / item) for item in dataset])


def test_file_that_changes_after_hashing_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "one"}')
    source = hash_file(path, nothing)
    path.write_text('{"text": "other"}')
    with pytest.raises(DataError, match="changed"):
        list(read_records(source))


def test_truncated_store_is_damaged(tmp_path: Path, tokenizer: TextTokenizer) -> None:
    (tmp_path / "a.txt").write_text("hello there")
    store = build(tmp_path / "store", tokenizer, tmp_path / "a.txt")
    tokens = store.folder / "tokens.bin"
    tokens.write_bytes(tokens.read_bytes()[:-1])
    with pytest.raises(DamagedFile, match=r"tokens\.bin"):
        TokenStore(store.folder)


def test_full_disk_is_a_disk_error_and_leaves_no_store(tmp_path: Path, tokenizer: TextTokenizer) -> None:
    (tmp_path / "a.txt").write_text("hello there " * 5000)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        with pytest.raises(DiskError, match="cannot write"):
            build(tmp_path / "out" / "store", tokenizer, tmp_path / "a.txt")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list((tmp_path / "out").iterdir()) == []


MEASURE = """
import sys
from pathlib import Path
from packmule.data.gguf_tokenizer import tokenizer_from_gguf
from packmule.data.prepare import peak_ram_bytes
from packmule.data.sources import hash_file
from packmule.data.tokenize import write_store
path, gguf, out = map(Path, sys.argv[1:])
write_store(out, tokenizer_from_gguf(gguf), [[hash_file(path, lambda n: None)]], lambda n: None)
print(peak_ram_bytes())
"""


@pytest.mark.parametrize("suffix", [".txt", ".jsonl"])
def test_memory_does_not_grow_with_the_input(
    suffix: str, tmp_path: Path, byte_level: Callable[..., Path], seed: int
) -> None:
    rng = random.Random(seed)
    text = random_text(rng, 10_000)
    unit = text + "\n" if suffix == ".txt" else json.dumps({"text": text[:2000]}) + "\n"
    peaks = []
    for size in (2 << 20, 6 << 20):
        path = tmp_path / f"{size}{suffix}"
        path.write_text(unit * (size // len(unit)), encoding="utf-8", newline="")
        command = [
            sys.executable,
            "-c",
            MEASURE,
            str(path),
            str(byte_level("smollm")),
            str(tmp_path / f"s{size}"),
        ]
        peaks.append(int(subprocess.run(command, check=True, capture_output=True, text=True).stdout))
    print(f"peaks: {peaks}")
    # the ids of the larger input alone would take some 80 MiB as Python numbers
    assert peaks[1] - peaks[0] < 12 << 20
