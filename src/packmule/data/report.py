"""What a run asks of data preparation, and what it is told: the records between parent and child."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from packmule.data.rows import LongDocuments, RowsMeta
from packmule.data.store import EntryReport
from packmule.spec.records import Record


class NamedData(Record):
    """Validation data of its own."""

    name: str
    dataset: tuple[str, ...] = Field(min_length=1)


class PrepareRequest(Record):
    """What to prepare, and where."""

    model: str = Field(description=".gguf file or Hugging Face folder")
    dataset: tuple[str, ...] = Field(min_length=1, description="files, folders, globs")
    weights: tuple[float, ...] = Field(default=(), description="one per dataset; empty: no mix")
    format: str = "auto"
    columns: dict[str, str] = Field(default={}, description="our name of a column -> the files'")
    train_on: Literal["assistant", "all"] = "assistant"
    chat_template: str | None = Field(default=None, description="a file in place of the model's own")
    long_documents: Literal["auto"] | LongDocuments = "auto"
    deduplicate: float | None = Field(default=None, gt=0, le=1, description="Jaccard similarity")
    max_seq_length: int = Field(ge=2)
    val_size: float = Field(default=0.0, ge=0, description="fraction below 1, or documents")
    validation: tuple[NamedData, ...] = Field(default=(), description="in place of val_size")
    validation_only: bool = Field(default=False, description="hold all documents out, for evaluation")
    seed: int = 0
    out: str = Field(description="run folder")
    sample_prompt: str = Field(default="", description="text whose token ids the report gives")
    random_init: bool = Field(default=False, description="draw the weights instead of reading them")
    ram_bytes: int | None = Field(default=None, description="bound on what the child allocates")


class SourceReport(Record):
    """One entry of `data.path`.

    Attributes:
        weight: in the mix, or None.
        held: what its files hold; None before they are read.
        rows: of the mix; None without one.
    """

    path: str
    weight: float | None = None
    files: int
    bytes: int
    held: EntryReport
    rows: int | None = None


class NamedRows(Record):
    """A validation set."""

    name: str
    rows: RowsMeta


class PrepareReport(Record):
    """What was prepared. Lengths in tokens; `fill` in percent of rows * max_seq_length."""

    documents: int
    tokens: int
    sources: tuple[SourceReport, ...] = ()
    train: RowsMeta
    validation: tuple[NamedRows, ...] = ()
    train_fill_percent: float
    reused: bool = Field(description="the token store was there already")
    duplicates: str | None = Field(default=None, description="file that names documents left out")
    sample_ids: tuple[int, ...] = Field(default=(), description="of the sample prompt, bos first if used")
    seconds: float
    peak_ram_bytes: int | None = Field(description="VmHWM of this process, where /proc has it")


class PreviewReport(Record):
    """What the data looks like, from the first document of each file format; nothing is written."""

    sources: tuple[SourceReport, ...]
