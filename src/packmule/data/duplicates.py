"""Near-duplicate documents, found in bounded memory: MinHash bands, one Bloom filter per band (LSHBloom).

A document's MinHash signature (Broder 1997) is cut into bands; two documents of Jaccard similarity s over
their shingles share a band of r values with probability s**r. The bands of the documents kept so far are in
one Bloom filter (Bloom 1970) each instead of an index (Khan et al. 2024, LSHBloom); a document with a band
that is there already is left out. So the first of several alike is kept. Signatures wait in a file until
it is known how many there are; the filters are the only memory that grows, by a few bytes per document.
"""

from __future__ import annotations

import json
import math
import re
import tempfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from packmule.data.documents import Document, Marked, Numbered, Reading, Tally, documents
from packmule.data.files import disk_errors, write_text
from packmule.data.sources import Source

HASHES = 128
"""Values of a signature."""

SHINGLE = 5
"""Words (or ids) of a shingle; a shorter document is one shingle."""

FALSE_POSITIVES = 1e-5
"""Bound on the share of documents that a Bloom filter's mistake leaves out."""

DEFAULT_SIMILARITY = 0.8
_WORDS = re.compile(r"\w+")
_CHUNK = 1 << 12
_U64 = np.uint64


class Bands(NamedTuple):
    """How signatures are cut: `bands` of `rows` values each; some values may stay unused."""

    bands: int
    rows: int

    def collide(self, similarity: float) -> float:
        """Probability that two documents so similar share a band."""
        return float(1 - (1 - similarity**self.rows) ** self.bands)


class Dropped(NamedTuple):
    """A document that is left out.

    Attributes:
        file, number: where it stands: the number within its file, from 0.
        place: its number over all files, from 0.
        band: the first of its bands that an earlier document has.
    """

    file: Path
    number: int
    place: int
    band: int


@lru_cache
def bands_for(similarity: float, hashes: int = HASHES) -> Bands:
    """The cut with the least false positives and negatives for a threshold.

    Both are areas under the collision curve, below and above the threshold, weighed alike.

    Args:
        similarity: Jaccard threshold, above 0, at most 1.
    """

    def error(cut: Bands) -> float:
        grid = (np.arange(1000) + 0.5) / 1000
        curve = 1 - (1 - grid**cut.rows) ** cut.bands
        below = grid < similarity
        return float(curve[below].sum() + (1 - curve[~below]).sum())

    cuts = [Bands(b, r) for b in range(1, hashes + 1) for r in range(1, hashes // b + 1)]
    return min(cuts, key=error)


class BloomFilter:
    """A set of 64-bit keys that may say yes by mistake.

    Sized by m = -n ln p / (ln 2)**2 bits and k = m / n ln 2 hashes; positions by double hashing (Kirsch
    and Mitzenmacher 2006).

    Args:
        capacity: keys it will hold, n.
        mistakes: chance p of a wrong yes when it is full.
    """

    def __init__(self, capacity: int, mistakes: float) -> None:
        bits = math.ceil(-max(1, capacity) * math.log(mistakes) / math.log(2) ** 2)
        self._bits = np.zeros(-(-bits // 8), np.uint8)
        self._count = len(self._bits) * 8
        self._steps = np.arange(max(1, round(bits / max(1, capacity) * math.log(2))), dtype=_U64)

    @property
    def bytes(self) -> int:
        """Memory it takes."""
        return len(self._bits)

    def _places(self, key: int) -> np.ndarray:
        first, second = mix(np.array([key, key ^ 0x5851F42D4C957F2D], _U64))
        return (first + self._steps * (second | _U64(1))) % _U64(self._count)

    def __contains__(self, key: int) -> bool:
        places = self._places(key)
        return bool((self._bits[places >> _U64(3)] >> (places & _U64(7)).astype(np.uint8) & 1).all())

    def add(self, key: int) -> None:
        """Put a key in."""
        places = self._places(key)
        np.bitwise_or.at(self._bits, places >> _U64(3), _U8_ONE << (places & _U64(7)).astype(np.uint8))


_U8_ONE = np.uint8(1)


def mix(value: np.ndarray) -> np.ndarray:
    """SplitMix64's finalizer (Steele, Lea and Flood 2014) on uint64."""
    with np.errstate(over="ignore"):
        value = (value ^ (value >> _U64(30))) * _U64(0xBF58476D1CE4E5B9)
        value = (value ^ (value >> _U64(27))) * _U64(0x94D049BB133111EB)
    return value ^ (value >> _U64(31))


class Signature:
    """The MinHash signature of one document, fed in parts."""

    _salts = mix(np.arange(1, HASHES + 1, dtype=_U64) * _U64(0x9E3779B97F4A7C15))

    def __init__(self) -> None:
        self._least = np.full(HASHES, np.iinfo(_U64).max, _U64)
        self._tail = np.empty(0, _U64)  # words that begin shingles not complete yet
        self._any = False
        self._check = 0  # of the whole text, for one without words

    def feed_text(self, text: str) -> None:
        """Words, in lower case; marks and white space do not count."""
        self._check = zlib.crc32(text.encode(), self._check)
        words = _WORDS.findall(text.lower())
        self.feed(np.fromiter((zlib.crc32(word.encode()) for word in words), _U64, len(words)))

    def feed(self, items: np.ndarray) -> None:
        """Words as numbers, uint64."""
        items = np.concatenate([self._tail, items])
        count = len(items) - SHINGLE + 1
        if count > 0:
            self._add(_shingles(items, SHINGLE, count))
        self._tail = items[max(0, count) :]

    def finish(self) -> np.ndarray:
        """uint64 [HASHES]."""
        if not self._any:
            items = self._tail if len(self._tail) else np.array([self._check], _U64)
            self._add(_shingles(items, len(items), 1))
        return self._least

    def _add(self, shingles: np.ndarray) -> None:
        self._any = self._any or len(shingles) > 0
        for begin in range(0, len(shingles), _CHUNK):
            part = shingles[begin : begin + _CHUNK]
            hashed = mix(part[None, :] ^ self._salts[:, None])
            np.minimum(self._least, hashed.min(1), out=self._least)


def _shingles(items: np.ndarray, size: int, count: int) -> np.ndarray:
    """Each `size` neighbours as one number, uint64 [count]."""
    value = np.zeros(count, _U64)
    for offset in range(size):
        value = mix(value ^ (items[offset : offset + count] + _U64(offset + 1)))
    return value


def band_keys(signature: np.ndarray, cut: Bands) -> np.ndarray:
    """One number per band: uint64 [bands]."""
    values = signature[: cut.bands * cut.rows].reshape(cut.bands, cut.rows)
    keys = np.arange(cut.bands, dtype=_U64)
    for column in values.T:
        keys = mix(keys ^ column)
    return keys


def find_duplicates(
    groups: Sequence[Sequence[Source]],
    reading: Reading,
    similarity: float,
    folder: Path,
    progress: Callable[[int], None],
) -> list[Dropped]:
    """Documents that resemble an earlier one, over all files in order.

    Args:
        similarity: Jaccard similarity over shingles of five words from which on a document is left out,
            with the probability that `Bands.collide` gives.
        folder: where signatures wait, in a file without a name; 8 bytes per band and document.
        progress: called with the bytes of all files read so far.

    Raises:
        DataError: a file that cannot be used.
        DiskError: the disk is full.
    """
    cut = bands_for(similarity)
    places: list[tuple[Path, int]] = []  # of each file: how many documents came before it
    with disk_errors(folder), tempfile.TemporaryFile(dir=folder) as file:
        count, before = 0, 0
        for source in (source for group in groups for source in group):
            places.append((source.path, count))
            for keys, end in _keys_of(source, reading, cut):
                file.write(keys.tobytes())
                count += 1
                if not count % 64:
                    progress(before + end)
            before += source.bytes
        file.seek(0)
        return list(_sift(file, count, cut, places))


def _keys_of(source: Source, reading: Reading, cut: Bands) -> Iterator[tuple[np.ndarray, int]]:
    signature = Signature()
    for document in documents(source, reading, Tally()):
        last = _feed(signature, document)
        if last:
            yield band_keys(signature.finish(), cut), document.end
            signature = Signature()


def _feed(signature: Signature, document: Document) -> bool:
    """Take in a document or a part; whether it is complete."""
    if isinstance(document, Numbered):
        signature.feed(document.tokens.ids.astype(_U64))
        return True
    if isinstance(document, Marked):
        signature.feed_text(document.said)
        return True
    signature.feed_text(document.text)
    return document.last


def _sift(file: BinaryIO, count: int, cut: Bands, places: Sequence[tuple[Path, int]]) -> Iterator[Dropped]:
    """Pass all documents through the filters."""
    mistakes = 1 - (1 - FALSE_POSITIVES) ** (1 / cut.bands)
    filters = [BloomFilter(count, mistakes) for _ in range(cut.bands)]
    at = 0
    for index in range(count):
        while at + 1 < len(places) and places[at + 1][1] <= index:
            at += 1
        keys = np.frombuffer(file.read(cut.bands * 8), _U64).tolist()
        band = next((b for b, key in enumerate(keys) if key in filters[b]), None)
        if band is not None:
            yield Dropped(places[at][0], index - places[at][1], index, band)
            continue
        for bloom, key in zip(filters, keys, strict=True):
            bloom.add(key)


def write_report(path: Path, dropped: Sequence[Dropped], similarity: float) -> None:
    """One JSON object per line: first the settings, then each document left out.

    Raises:
        DiskError: the file cannot be written.
    """
    cut = bands_for(similarity)
    head = {
        "format": 1, "similarity": similarity, "hashes": HASHES, "bands": cut.bands, "rows": cut.rows,
        "shingle_words": SHINGLE, "false_positives": FALSE_POSITIVES, "dropped": len(dropped),
    }  # fmt: skip
    lines = [head, *({"file": str(d.file), "document": d.number, "band": d.band} for d in dropped)]
    write_text(path, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))
