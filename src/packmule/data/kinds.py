"""Which kinds of data files there are, told by their names. Nothing is opened here."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

CONTAINERS = {
    ".txt": "text", ".md": "text", ".jsonl": "lines", ".ndjson": "lines", ".json": "json",
    ".csv": "csv", ".tsv": "tsv", ".parquet": "parquet",
}  # fmt: skip
"""suffix -> how documents lie in the file."""

COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}


class Kind(NamedTuple):
    """How a file is written: its container, and its compression or ""."""

    container: str
    compression: str


def kind_of(path: Path) -> Kind | None:
    """The kind of a file by its suffixes (".jsonl.gz"), or None."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    compression = COMPRESSIONS.get(suffixes[-1], "") if suffixes else ""
    inner = suffixes[:-1] if compression else suffixes
    container = CONTAINERS.get(inner[-1]) if inner else None
    if container is None or (compression and container == "parquet"):
        return None  # parquet is compressed inside: its reader needs to seek
    return Kind(container, compression)


def supported() -> str:
    """The suffixes, for messages."""
    return f"{', '.join(CONTAINERS)}; all but .parquet also with {' or '.join(COMPRESSIONS)}"
