"""Near-duplicates: what an exact index of bands finds, within the stated rate of mistakes, and reported."""

from __future__ import annotations

import json
import math
import random
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from tests.unit.data.chats import CHATML, conversation
from tests.unit.data.samples import SPECIALS

from packmule.data.documents import Reading
from packmule.data.duplicates import (
    FALSE_POSITIVES,
    HASHES,
    SHINGLE,
    BloomFilter,
    Signature,
    band_keys,
    bands_for,
    find_duplicates,
    write_report,
)
from packmule.data.sources import Source, hash_file
from packmule.data.template import ChatTemplate
from packmule.data.text import PIECE_CHARACTERS


def words(rng: random.Random, count: int) -> list[str]:
    return [f"w{rng.randrange(10_000)}" for _ in range(count)]


def changed(rng: random.Random, text: list[str], share: float) -> list[str]:
    """The same words with a share of them replaced."""
    return [f"x{rng.randrange(10_000)}" if rng.random() < share else word for word in text]


def signature(text: list[str]) -> np.ndarray:
    found = Signature()
    found.feed_text(" ".join(text))
    return found.finish()


def jaccard(first: list[str], second: list[str]) -> float:
    sets = [
        {tuple(text[i : i + SHINGLE]) for i in range(len(text) - SHINGLE + 1)} for text in (first, second)
    ]
    return len(sets[0] & sets[1]) / len(sets[0] | sets[1])


def source(path: Path, texts: list[str]) -> Source:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return hash_file(path, lambda done: None)


def test_signatures_agree_as_often_as_shingles_do(seed: int) -> None:
    rng = random.Random(seed)
    for share in (0.0, 0.01, 0.05, 0.15):
        errors = []
        for _ in range(20):
            text = words(rng, 400)
            other = changed(rng, text, share)
            agreed = float((signature(text) == signature(other)).mean())
            errors.append(agreed - jaccard(text, other))
        # each is a mean of 128 draws: deviation at most 0.044, of twenty together 0.01
        assert abs(np.mean(errors)) < 0.05, share


def test_a_signature_does_not_depend_on_how_a_text_is_cut(seed: int) -> None:
    rng = random.Random(seed)
    for count in (0, 1, 2, SHINGLE - 1, SHINGLE, 50, 300):
        text = words(rng, count)
        parts = Signature()
        cuts = sorted(rng.randrange(count + 1) for _ in range(4))
        for begin, end in pairwise([0, *cuts, count]):
            parts.feed_text(" ".join(text[begin:end]))
        assert np.array_equal(parts.finish(), signature(text)), count


def test_texts_without_words_differ() -> None:
    found = []
    for text in ("?!", "...", "?!"):
        made = Signature()
        made.feed_text(text)
        found.append(made.finish().tolist())
    assert found[0] == found[2] != found[1]


@pytest.mark.parametrize("threshold", [0.5, 0.7, 0.8, 0.9, 1.0])
def test_bands_separate_at_the_threshold(threshold: float) -> None:
    cut = bands_for(threshold)
    assert cut.bands * cut.rows <= HASHES
    if threshold < 1:
        assert cut.collide(max(0.0, threshold - 0.25)) < 0.15
        assert cut.collide(min(1.0, threshold + 0.15)) > 0.85
    assert cut.collide(1.0) == 1.0


def test_a_filter_forgets_nothing_and_mistakes_are_as_rare_as_said(seed: int) -> None:
    rng = np.random.default_rng(seed)
    keys = rng.integers(0, 1 << 63, 3000).tolist()
    bloom = BloomFilter(2000, 0.01)
    assert bloom.bytes == pytest.approx(2000 * -math.log(0.01) / math.log(2) ** 2 / 8, abs=1)
    for key in keys[:2000]:
        bloom.add(key)
    assert all(key in bloom for key in keys[:2000])
    others = rng.integers(0, 1 << 63, 8000).tolist()
    # binomial with mean 80 and deviation 9
    assert sum(key in bloom for key in others) < 80 + 6 * 9


def test_the_first_of_several_alike_is_kept_and_the_others_are_reported(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    originals = [words(rng, 200) for _ in range(80)]
    texts, alike = [], []
    for text in originals:
        texts.append(" ".join(text))
        alike.append(False)
        if rng.random() < 0.5:
            texts.append(" ".join(changed(rng, text, 0.002)).upper())
            alike.append(True)
    half = len(texts) // 2
    files = [source(tmp_path / "a.jsonl", texts[:half]), source(tmp_path / "b.jsonl", texts[half:])]
    # Copies are at least 0.8 alike, so that at this threshold the chance to miss one is below 1e-4.
    assert bands_for(0.5).collide(0.8) > 1 - 1e-4
    found = find_duplicates([files[:1], files[1:]], Reading(), 0.5, tmp_path, lambda done: None)
    assert [document.place for document in found] == [i for i, same in enumerate(alike) if same]
    for document in found:
        assert document.file == files[document.place >= half].path
        assert document.number == document.place - (half if document.place >= half else 0)
    write_report(tmp_path / "report.jsonl", found, 0.5)
    head, *lines = [json.loads(line) for line in (tmp_path / "report.jsonl").read_text().splitlines()]
    assert head["dropped"] == len(lines) == len(found)
    assert head["false_positives"] == FALSE_POSITIVES
    assert lines[0] == {"file": str(found[0].file), "document": found[0].number, "band": found[0].band}
    assert {path.name for path in tmp_path.iterdir()} == {"a.jsonl", "b.jsonl", "report.jsonl"}


@pytest.mark.parametrize("threshold", [0.5, 0.8])
def test_an_exact_index_of_bands_finds_the_same(threshold: float, tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    texts: list[list[str]] = []
    for _ in range(400):
        near = texts and rng.random() < 0.6
        texts.append(changed(rng, rng.choice(texts), rng.random() * 0.2) if near else words(rng, 60))
    cut, seen, expected = bands_for(threshold), [set[int]() for _ in range(HASHES)], []
    for index, text in enumerate(texts):
        keys = band_keys(signature(text), cut).tolist()
        hits = [band for band, key in enumerate(keys) if key in seen[band]]
        if hits:
            expected.append((index, hits[0]))
            continue
        for band, key in enumerate(keys):
            seen[band].add(key)
    file = source(tmp_path / "a.jsonl", [" ".join(text) for text in texts])
    found = find_duplicates([[file]], Reading(), threshold, tmp_path, lambda done: None)
    # a filter's mistake would be one in a hundred thousand documents
    assert [(document.place, document.band) for document in found] == expected
    assert 0 < len(expected) < 399


def test_what_a_template_adds_makes_no_two_conversations_alike(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    template = ChatTemplate("be " * 500 + CHATML, {}, SPECIALS, Path("model"))
    chats = [conversation(rng, 1) for _ in range(30)]
    for number, chat in enumerate(chats):
        chat[0]["content"] += f" number {number} of {rng.random()}"
    chats.append(chats[4])
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    file = hash_file(path, lambda done: None)
    found = find_duplicates([[file]], Reading(template=template), 0.8, tmp_path, lambda done: None)
    assert [document.place for document in found] == [30]


def test_long_texts_are_read_in_pieces(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    text = " ".join(words(rng, PIECE_CHARACTERS // 3))
    other = " ".join(words(rng, PIECE_CHARACTERS // 3))
    for name, content in (("a.txt", text), ("b.txt", other), ("c.txt", text + " and more")):
        (tmp_path / name).write_text(content)
    files = [hash_file(tmp_path / name, lambda done: None) for name in ("a.txt", "b.txt", "c.txt")]
    found = find_duplicates([files], Reading(), 0.8, tmp_path, lambda done: None)
    assert [(document.file.name, document.number) for document in found] == [("c.txt", 0)]


def test_filters_take_a_few_bytes_per_document() -> None:
    cut = bands_for(0.8)
    mistakes = 1 - (1 - FALSE_POSITIVES) ** (1 / cut.bands)
    size = sum(BloomFilter(1_000_000, mistakes).bytes for _ in range(cut.bands))
    # an index holds at least a key and a number of 8 bytes each per band and document
    assert size < cut.bands * 1_000_000 * 16 / 4
    assert 1 - (1 - mistakes) ** cut.bands == pytest.approx(FALSE_POSITIVES)
