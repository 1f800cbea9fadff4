"""What may change when a run is resumed, as one table: what is compared, what a change does.

`docs/guide.md` prints the same rows; a test holds them together. Which data and numerics a run has
is compared where they are known (packmule.train.launch); the rows here say what follows.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, Literal

from packmule.errors import ConfigError
from packmule.spec.job import SECTIONS, Job

Effect = Literal["keeps", "said", "renumber", "refused"]
"""keeps: the bits stay what they would have been. said: the run goes on otherwise from here, and a
note says so. renumber: refused unless `--renumber` is given; then said. refused: with the way out."""


@dataclass(frozen=True)
class Row:
    """One row of the table.

    Attributes:
        what: changes, in words.
        keys: dotted names of job fields ("section.*" for those no other row names), or `numerics`
            fields that do not come from the job.
        then: what a change does, or the way out.
    """

    what: str
    keys: tuple[str, ...]
    effect: Effect
    then: str


WARM_START = "start another run from its weights: `--model {run} --output-dir NEW`"

TABLE = (
    Row(
        "budget, placement, disk",
        ("hardware.*",),
        "keeps",
        "the rest of the run is planned anew",
    ),
    Row(
        "recomputation, update mode",
        ("train.recompute", "train.update"),
        "keeps",
        "the rest of the run is planned anew",
    ),
    Row(
        "the run's folder",
        ("train.output_dir", "hardware.disk_path"),
        "keeps",
        "a run that was moved or copied whole goes on where it is",
    ),
    Row(
        "commits, snapshots",
        ("checkpoint.*",),
        "keeps",
        "from the next step on",
    ),
    Row(
        "logging",
        ("logging.*",),
        "keeps",
        "from the next step on",
    ),
    Row(
        "evaluation, samples, early stop, time limit",
        (
            *("data.val_path", "data.val_factory", "data.val_arguments"),
            *("train.eval_steps", "train.eval_rows", "train.best_metric"),
            *("train.early_stop_patience", "train.early_stop_min_delta", "train.max_minutes"),
            *("train.sample_prompt", "train.sample_tokens"),
        ),
        "keeps",
        "from the next evaluation on",
    ),
    Row(
        "length of the run",
        ("train.max_steps", "train.epochs", "train.max_tokens"),
        "said",
        "the schedule is drawn anew for the new length and goes on from the step the run is at; "
        "fewer steps than are done are refused",
    ),
    Row(
        "learning rate, schedule",
        (
            *("optim.learning_rate", "optim.lr_scheduler", "optim.warmup_steps", "optim.warmup_ratio"),
            *("optim.min_lr", "optim.decay_steps", "optim.decay_ratio", "optim.decay_shape"),
            *("optim.lr_scaling", "optim.lr_base_batch_size"),
        ),
        "said",
        "the new schedule goes on from the step the run is at",
    ),
    Row(
        "clipping, weight decay, balance of experts, AdamW's constants",
        (
            *("train.router_aux_loss_coef",),
            *("optim.max_grad_norm", "optim.weight_decay", "optim.weight_decay_on"),
            *("optim.weight_decay_embedding", "optim.adam_beta1", "optim.adam_beta2", "optim.adam_epsilon"),
        ),
        "said",
        "from the next step on; the moments are kept",
    ),
    Row(
        "data: files added, removed or changed",
        ("data.*",),
        "said",
        "an epoch of the new data begins at the step the run is at; text held out is drawn anew. "
        "The same content under another name changes nothing",
    ),
    Row(
        "micro-batches",
        ("train.micro_batch_size", "train.gradient_accumulation_steps"),
        "renumber",
        "sums are rounded otherwise",
    ),
    Row(
        "threads",
        ("hardware.threads", "numerics.threads"),
        "renumber",
        "sums are rounded otherwise",
    ),
    Row(
        "device: a GPU or the cores",
        ("hardware.device", "numerics.device"),
        "renumber",
        "sums are rounded otherwise; `fake` has the bits of the cores",
    ),
    Row(
        "machine: CPU features, torch, native kernels",
        ("numerics.cpu_features", "numerics.torch", "numerics.kernels"),
        "renumber",
        "sums are rounded otherwise; between CPUs with the same features nothing changes",
    ),
    Row(
        "precision",
        ("train.precision", "numerics.precision"),
        "renumber",
        "between fp32 and bf16-mixed, whose state is the same; fp64 is refused",
    ),
    Row(
        "model",
        ("model.*",),
        "refused",
        WARM_START,
    ),
    Row(
        "rows: their length, how many a step, their order, what is held out",
        (
            *("train.max_seq_length", "train.global_batch_size", "train.seed", "data.val_size"),
            *("optim.batch_warmup_steps", "optim.batch_warmup_rows"),
        ),
        "refused",
        WARM_START,
    ),
    Row(
        "optimizer, turns of blocks",
        (
            *("optim.optim", "optim.block_schedule", "optim.block_layers", "optim.block_steps"),
            *("optim.block_order", "optim.block_ends"),
        ),
        "refused",
        WARM_START,
    ),
)


COMPUTED_KEYS = tuple(
    f"numerics.{key}" for key in ("precision", "threads", "kernels", "torch", "cpu_features", "device")
)
"""What rounds the numbers of a run and does not come from the job alone."""


def fields() -> list[str]:
    """Every field of a job, dotted."""
    return [f"{section}.{key}" for section, kind in SECTIONS.items() for key in kind.model_fields]


def row_of(key: str) -> Row:
    """The row that decides a field of a job or of `numerics`: the one that names it, else the one of
    its section."""
    named = [row for row in TABLE if key in row.keys]
    rest = [row for row in TABLE if f"{key.partition('.')[0]}.*" in row.keys]
    return [*named, *rest][0]


@dataclass(frozen=True)
class Change:
    """A field that differs.

    Attributes:
        key: dotted.
        before, after: its values.
    """

    key: str
    before: Any
    after: Any

    @property
    def row(self) -> Row:
        """What follows."""
        return row_of(self.key)

    def __str__(self) -> str:
        return f"`{self.key}` was {_shown(self.before)}, is {_shown(self.after)}"


def _shown(value: Any) -> str:
    return "null" if value is None else repr(value)


def _value(job: Job, key: str) -> Any:
    """A field's value; paths count by their last component: a moved folder is the same folder."""
    section, _, name = key.partition(".")
    value = getattr(getattr(job, section), name)
    if key in ("model.path", "model.factory"):
        return PurePath(value or "").name
    if key == "data.val_size" and not job.data.held_out:
        return 0
    return value


def changes(before: Job, after: Job, effects: Iterable[Effect]) -> list[Change]:
    """What differs between the job of a run and the one that resumes it, of these effects."""
    found = (Change(key, _value(before, key), _value(after, key)) for key in fields())
    wanted = frozenset(effects)
    return [change for change in found if change.before != change.after and change.row.effect in wanted]


def refuse(before: Job, after: Job, run: str) -> None:
    """Refuse to resume where a row of the table says so.

    Args:
        run: the run's folder, for the message.

    Raises:
        ConfigError: names what differs and the way out.
    """
    found = changes(before, after, ("refused",))
    if found:
        raise ConfigError(
            f"{run} holds a run that promised otherwise: {'; '.join(map(str, found))}.",
            f"restore what it was to carry on, or {found[0].row.then.format(run=run)}",
        )


def job_hash(job: Job) -> str:
    """SHA-256 (hex) over what a run never changes: the fields whose change is refused."""
    kept = {key: _value(job, key) for key in fields() if row_of(key).effect == "refused"}
    later = [key for key in kept if key in ("model.factory", "model.arguments") or ".block_" in key]
    for key in later:  # of runs that have none, as before there were any
        section, _, name = key.partition(".")
        if getattr(getattr(job, section), name) == SECTIONS[section].model_fields[name].get_default():
            del kept[key]
    text = json.dumps(kept, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
