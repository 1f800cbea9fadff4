"""What a start goes on from: the commit, whether this job may, and what changes. No torch.

The rules are the table of packmule.spec.resume; here are the things it is applied to.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from packmule.checkpoint.head import Head
from packmule.data.prepared import INDEX, DataIndex
from packmule.errors import ConfigError, DamagedFile
from packmule.plan.candidates import splits
from packmule.spec.job import Job
from packmule.spec.plan import Numerics
from packmule.spec.resume import COMPUTED_KEYS, Change, changes, refuse, row_of
from packmule.train.folder import RunFolder, read_text

ASKED = ("clip", "router_aux_loss_coef", "optimizer", "schedule")
"""Fields of Numerics that follow the job at each start."""


@dataclass(frozen=True)
class DataStart:
    """Which data a run trains on, and where in the run it began to.

    Attributes:
        key: names the row set by its content.
        cursor: rows of all steps before this data's first.
        tokens: targets of these.
    """

    key: str
    cursor: int = 0
    tokens: int = 0


@dataclass(frozen=True)
class Found:
    """What a start goes on from.

    Attributes:
        head: the commit, or None for a fresh run.
        whole: HEAD.json of this folder is there and undamaged.
        before: the job of the run that `head` is of; None where its config.yaml is gone.
        elsewhere: the folder of another run's state that this one begins with, or None.
    """

    head: Head | None = None
    whole: bool = False
    before: Job | None = None
    elsewhere: RunFolder | None = None

    @property
    def step(self) -> int:
        """Steps done."""
        return self.head.step if self.head else 0


def find(job: Job, folder: RunFolder) -> Found:
    """The commit to go on from, after checking that this job may.

    Raises:
        ConfigError: it may not: `checkpoint.resume`, or a change that the table refuses.
        DamagedFile: HEAD.json is damaged and there is no config.yaml.
    """
    known = folder.config.exists()
    try:
        head = folder.head()
    except DamagedFile:
        head = None
        if not known:
            raise
    whole = head is not None
    if head is None:
        head = folder.newest_snapshot()  # the child goes back to it
    before = folder.job() if known else None
    resume, elsewhere = job.checkpoint.resume, None
    if head is not None:
        if resume == "never":
            raise ConfigError(
                f"{folder.path} holds a run at step {head.step}, and resume is `never`.",
                "use another --output-dir, or --resume auto to carry on",
            )
        if resume != "auto" and (before is None or before.checkpoint.resume != resume):
            raise ConfigError(
                f"{folder.path} holds a run at step {head.step} that did not begin with {resume}.",
                f"use another --output-dir to go on from {resume}, or --resume auto to carry on here",
            )
    elif resume not in ("auto", "never"):
        elsewhere = RunFolder.open(Path(resume))
        head, before = elsewhere.head(), elsewhere.job()
        if head is None:
            raise ConfigError(
                f"`checkpoint.resume` = {resume!r}: nothing has been committed there.",
                "give the folder of a run that has begun, or a checkpoint-N",
            )
    if head is not None and before is not None:
        refuse(before, job, str(folder.path if elsewhere is None else elsewhere.state))
    return Found(head, whole, before, elsewhere)


def numerics_of(found: Found, job: Job, fresh: Numerics, renumber: bool) -> Numerics:
    """The numerics to go on with: what is computed as before, what the job asks as it asks.

    Raises:
        ConfigError: this machine or job would round otherwise, and `renumber` is not given.
    """
    if found.head is None:
        return fresh
    kept = found.head.numerics
    if renumber:  # the state on disk stays as it is cut
        return fresh.model_copy(update={"vocabulary_parts": kept.vocabulary_parts})
    differing = [str(change) for change in computed_changes(found, job, fresh)]
    if differing:
        raise ConfigError(
            f"The run was computed with other numerics: {'; '.join(differing)}.",
            "restore them, or add --renumber to carry on with slightly different rounding",
        )
    return kept.model_copy(update={key: getattr(fresh, key) for key in ASKED})


def computed_changes(found: Found, job: Job, fresh: Numerics) -> list[Change]:
    """What rounds otherwise than in the run so far."""
    if found.head is None:
        return []
    kept = found.head.numerics
    names = [(key, key.removeprefix("numerics.")) for key in COMPUTED_KEYS]
    pairs = [(key, getattr(kept, name), getattr(fresh, name)) for key, name in names]
    different = [Change(*pair) for pair in pairs if pair[1] != pair[2]]
    if found.before is not None:
        asked = [c for c in changes(found.before, job, ("renumber",)) if c.key == "train.micro_batch_size"]
        wanted = job.train.micro_batch_size
        if asked and wanted != "auto" and splits(kept.rows, wanted)[0] != kept.micro_rows:
            different += asked
    return different


def data_of(found: Found, folder: RunFolder) -> DataStart:
    """The prepared data, and where in the run it begins: now, where its content is new."""
    path = folder.data / INDEX
    return data_start(found, DataIndex.parse_json(read_text(path), str(path)).train)


def data_start(found: Found, key: str) -> DataStart:
    """The same of data that a key names."""
    head = found.head
    if head is None:
        return DataStart(key)
    if head.data in (key, ""):  # earlier versions did not write it down
        return DataStart(key, head.data_cursor, head.data_tokens)
    return DataStart(key, head.cursor, head.tokens)


def said(found: Found, job: Job, fresh: Numerics, data: DataStart) -> list[str]:
    """One sentence per change that the rest of the run is trained with."""
    head = found.head
    if head is None:
        return []
    different = computed_changes(found, job, fresh)
    if found.before is not None:
        asked = changes(found.before, job, ("said",))
        different += [change for change in asked if not change.key.startswith("data.")]
    lines = [f"{change}: {change.row.then.partition(';')[0]}." for change in different]
    if head.data not in (data.key, ""):
        lines.append(f"The data changed: {row_of('data.path').then.partition(';')[0]}.")
    return lines
