"""Prepared data, opened: what OUT/data/data.json names. How it is made: packmule.data.prepare."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from packmule.data.files import read_text
from packmule.data.rows import Rows
from packmule.data.store import TokenStore
from packmule.errors import DataError
from packmule.spec.records import Record

INDEX = "data.json"
_FORMATS = (1, 2)


class ValidationIndex(Record):
    """A validation set: its folders relative to OUT/data."""

    name: str
    store: str
    rows: str


class DataIndex(Record):
    """OUT/data/data.json: folders relative to OUT/data. Format 1 has one row set of the same store."""

    format: int = _FORMATS[-1]
    store: str
    train: str
    validation: str | tuple[ValidationIndex, ...] | None = ()

    def validation_sets(self) -> tuple[ValidationIndex, ...]:
        """In the order in which they are evaluated."""
        if isinstance(self.validation, str):
            return (ValidationIndex(name="validation", store=self.store, rows=self.validation),)
        return self.validation or ()


@dataclass(frozen=True)
class ValidationSet:
    """Rows to judge on, and the store their tokens are in."""

    name: str
    store: TokenStore
    rows: Rows


@dataclass(frozen=True)
class PreparedData:
    """The data of a run, opened."""

    store: TokenStore
    train: Rows
    validation: tuple[ValidationSet, ...]


def open_data(folder: Path) -> PreparedData:
    """Open OUT/data as `prepare` left it.

    Raises:
        DataError, ConfigError, DamagedFile: missing, of another version, or damaged.
    """
    path = folder / INDEX
    index = DataIndex.parse_json(read_text(path), str(path))
    if index.format not in _FORMATS:
        raise DataError(f"{path}: format {index.format} is not supported.", "delete it; it is made again")
    store = TokenStore(folder / index.store)
    validation = tuple(
        ValidationSet(
            found.name,
            store if found.store == index.store else TokenStore(folder / found.store),
            Rows(folder / found.rows),
        )
        for found in index.validation_sets()
    )
    return PreparedData(store, Rows(folder / index.train), validation)
