"""The parent of a run: parse, probe, prepare, plan, start the child, watch it. Loads no torch."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from packmule.checkpoint.head import Head
from packmule.checkpoint.lock import RunLock
from packmule.data.report import PrepareReport, PreviewReport
from packmule.errors import ConfigError, DamagedFile, DiskError
from packmule.plan.explain import tables
from packmule.plan.search import Found, search
from packmule.plan.situation import Situation
from packmule.plan.table import Table, plain
from packmule.spec.environment import Environment
from packmule.spec.job import Job, changed_promises
from packmule.spec.plan import Numerics, Plan
from packmule.spec.units import format_bytes, format_seconds
from packmule.train.data import prepare_request, preview_data, preview_tables
from packmule.train.folder import RunFolder, read_log
from packmule.train.memory import process_memory
from packmule.train.messages import Request
from packmule.train.show import Show
from packmule.train.situation import (
    WATCH_BYTES,
    check_inputs,
    hardware_of,
    make_numerics,
    make_situation,
    ram_budget,
    refuse_unoffered,
    shape_of,
    text_positions,
    tokenizer_bytes,
    total_steps,
    with_own_memory,
)
from packmule.train.watch import interruptible, run_child

Progress = Callable[[str, float], None]


@dataclass(frozen=True, repr=False)
class Planned:
    """What planning found. `str` is what `packmule plan` prints.

    Attributes:
        plan: the plan chosen.
        found: the search it came from.
        situation: what it was asked.
        steps: of the run, where the job says it without looking at data.
        data: the formats of the data and an example of each, or why there are none.
    """

    plan: Plan
    found: Found
    situation: Situation
    steps: int | None
    data: PreviewReport | str

    def tables(self) -> list[Table]:
        """What the plan is, and why, and what the data looks like."""
        return [*tables(self.situation, self.found, self.steps), *preview_tables(self.data)]

    def shown_json(self) -> str:
        """The plan, with the data's formats and examples as `data`, or a string there that says why not."""
        data = self.data if isinstance(self.data, str) else self.data.model_dump(mode="json")["sources"]
        return json.dumps({**json.loads(self.plan.to_json()), "data": data}, indent=2) + "\n"

    def __str__(self) -> str:
        return plain(self.tables()).rstrip("\n")

    def __repr__(self) -> str:
        predicted, place = self.plan.predicted, self.plan.placement
        words = f"state {place.state}, weights {place.weights}, {self.plan.numerics.precision}"
        if predicted is not None:
            words = (
                f"{format_seconds(predicted.step_seconds)} per step, "
                f"{format_bytes(predicted.peak_ram_bytes)} at its peak; {words}"
            )
        return f"<Plan for {format_bytes(self.plan.budget_bytes)} of RAM: {words}>"

    def _repr_html_(self) -> str:
        return f"<pre>{escape(str(self))}</pre>"

    def to_json(self) -> str:
        """The plan as JSON, as plan.json holds it."""
        return self.plan.to_json()

    def write(self, path: str) -> None:
        """The plan as JSON.

        Raises:
            DiskError: it cannot be written.
        """
        try:
            Path(path).write_text(self.plan.to_json(), encoding="utf-8")
        except OSError as error:
            raise DiskError(
                f"{path} cannot be written: {error.strerror}.", "choose another --output"
            ) from None


def make_plan(job: Job, environment: Environment, progress: Progress) -> Planned:
    """Plan a job without running it; of the data only first records are read.

    Raises:
        PackmuleError: see the parts; DoesNotFit when nothing fits.
    """
    refuse_unoffered(job)
    shape = shape_of(Path(job.model.path).expanduser())
    hardware = hardware_of(job, environment, progress)
    numerics = make_numerics(job, hardware, total_steps(job, None))
    prompt = job.train.sample_prompt
    positions = 0
    if prompt is not None:
        # A token is a byte at least.
        positions = min(len(prompt.encode()) + 1 + job.train.sample_tokens, shape.max_positions)
    situation = make_situation(
        job, shape, hardware, ram_budget(job, hardware), None, numerics, False, positions
    )
    tokenizer = tokenizer_bytes(Path(job.model.path).expanduser(), shape) if positions else 0
    found = search(with_own_memory(situation, tokenizer))
    return Planned(found.plan, found, situation, job.train.max_steps, preview_data(job, environment))


def _search(situation: Situation, tokenizer: int) -> tuple[Situation, Found]:
    """Search with this process's memory counted; once more should searching itself have taken
    more of it than was set aside (large models have large graphs)."""
    counted = with_own_memory(situation, tokenizer)
    found = search(counted)
    grown = with_own_memory(situation, tokenizer, WATCH_BYTES)
    if grown.hardware.parent_baseline_bytes <= counted.hardware.parent_baseline_bytes:
        return counted, found
    return grown, search(grown)


def train(job: Job, environment: Environment, renumber: bool, quiet: bool, json_lines: bool) -> int:
    """Run a job, or carry on with it.

    Returns:
        0; every other end is an exception with its exit code.

    Raises:
        PackmuleError: see the parts.
    """
    refuse_unoffered(job)
    folder = RunFolder.of(job)
    if not folder.config.exists():
        check_inputs(job)
    folder.make()
    show = Show(quiet=quiet, json_lines=json_lines, color=not environment.no_color)
    with interruptible(), RunLock(folder.path) as lock, show:
        run = _Start(job, environment, folder, show, renumber)
        if run.complete():
            return 0
        request = run.prepare()
        show.phase("start")
        run_child(
            "packmule.train.child",
            request.model_dump_json(),
            run.on_event,
            _child_variables(environment, run.plan),
            (lock.fileno(),),
        )
        run.finish()
    return 0


class _Start:
    """One start of a run: from the job to the child's request, then its events."""

    def __init__(
        self, job: Job, environment: Environment, folder: RunFolder, show: Show, renumber: bool
    ) -> None:
        self.job = job
        self.environment = environment
        self.folder = folder
        self.show = show
        self.renumber = renumber
        self.plan: Plan
        self._report: dict[str, Any] = {}
        self._measured: dict[str, Any] = {}
        self._peak = 0
        self._head = self._find_head()

    def complete(self) -> bool:
        """Whether there is nothing left to do; says so."""
        head, folder = self._head, self.folder
        if head is None or not self._whole or not folder.final.exists():
            return False
        total = head.numerics.schedule.total_steps
        log = read_log(folder.log)
        if head.step < total or not any(entry["step"] == total for entry in log):
            return False
        self.show.complete(total, folder.final, log)
        return True

    def prepare(self) -> Request:
        """Everything up to the child's start."""
        job, folder, show = self.job, self.folder, self.show
        head = self._head
        hardware = hardware_of(job, self.environment, show.fraction)
        show.machine(hardware)
        budget = ram_budget(job, hardware)
        report = self._prepare_data(budget)
        show.data(report)
        shape = folder.shape()
        steps = total_steps(job, report)
        numerics = make_numerics(job, hardware, steps)
        if head is not None:
            numerics = self._numerics_of(head, numerics)
        positions = text_positions(report.sample_ids, job.train.sample_tokens, shape)
        situation = make_situation(
            job, shape, hardware, budget, report, numerics,
            head is not None and not self.renumber, positions,
        )  # fmt: skip
        tokenizer = tokenizer_bytes(folder.model, shape) if positions else 0
        show.phase("plan")
        situation, found = _search(situation, tokenizer)
        self.plan = found.plan
        self._check_disk(situation, head)
        folder.write(folder.config, job.to_yaml())
        folder.write(folder.plan, self.plan.to_json())
        folder.write(folder.probe, hardware.to_json())
        show.plan(situation, found, head.step if head else 0, steps, job.train.sample_prompt or "")
        return Request(
            work="train",
            folder=str(folder.path),
            state=str(folder.state),
            data=str(folder.data),
            ram_bytes=situation.budget_bytes - situation.hardware.parent_baseline_bytes,
            total_steps=steps,
            sample_ids=report.sample_ids,
            positions=situation.sample_tokens,
            evaluation_rows=situation.evaluation_rows,
            mean_length=situation.mean_length,
        )

    def _find_head(self) -> Head | None:
        """The commit to resume from, after checking that this job may."""
        job, folder = self.job, self.folder
        known = folder.config.exists()
        try:
            head = folder.head()
        except DamagedFile:
            head = None
            if not known:
                raise
        self._whole = head is not None
        if head is None:
            head = folder.newest_snapshot()  # the child goes back to it
        if job.checkpoint.resume == "never" and head is not None:
            raise ConfigError(
                f"{folder.path} holds a run at step {head.step}, and resume is `never`.",
                "use another --output-dir, or --resume auto to carry on",
            )
        if known and head is not None:
            changed = changed_promises(folder.job(), job)
            if changed:
                raise ConfigError(
                    f"{folder.path} holds a run that promised otherwise: {'; '.join(changed)}.",
                    "restore what it was to carry on, or start another run with another --output-dir",
                )
        return head

    def _numerics_of(self, head: Head, fresh: Numerics) -> Numerics:
        """The run's numerics, if this machine still computes the same bits."""
        kept = head.numerics
        if self.renumber:
            return fresh
        changed = [
            f"{key} was {getattr(kept, key)!r}, is {getattr(fresh, key)!r}"
            for key in (
                "precision",
                "threads",
                "kernels",
                "torch",
                "cpu_features",
                "clip",
                "optimizer",
                "schedule",
            )
            if getattr(kept, key) != getattr(fresh, key)
        ]
        if changed:
            raise ConfigError(
                f"The run in {self.folder.path} was computed with other numerics: {'; '.join(changed)}.",
                "restore them, or add --renumber to carry on with slightly different rounding",
            )
        return kept

    def _prepare_data(self, budget: int) -> PrepareReport:
        request = prepare_request(self.job, self.folder.path, budget - process_memory().peak - WATCH_BYTES)
        self.show.phase("prepare data")
        run_child(
            "packmule.data.prepare", request.model_dump_json(), self.on_event, self.environment.of_child()
        )
        return PrepareReport.parse(self._report, "data preparation")

    def _check_disk(self, situation: Situation, head: Head | None) -> None:
        """Refuse before step 1 what would fill the disk later."""
        predicted = self.plan.predicted
        if predicted is None:
            return
        state = predicted.phases[0].disk_bytes
        snapshots = 0
        if self.plan.checkpoint.snapshot_steps:
            snapshots = state // 2 * (self.plan.checkpoint.snapshots_kept + 1)
        needed = (0 if head else state) + snapshots + 4 * situation.shape.numel
        free = situation.disk_free_bytes
        if needed > free:
            raise DiskError(
                f"The run needs {format_bytes(needed)} on the disk of {self.folder.state}; "
                f"{format_bytes(free)} are free, {format_bytes(needed - free)} short.",
                "free some space, choose another disk with --disk, or lower --save-total-limit",
            )

    def on_event(self, event: dict[str, Any]) -> None:
        """Keep what is needed later, show the rest."""
        name = event["event"]
        if name == "report":
            self._report = event["report"]
        elif name == "done":
            self._measured = event["measured"]
        elif name == "end":
            self._peak = event.get("peak_bytes", 0)
        self.show.event(event)

    def finish(self) -> None:
        """Predicted beside measured, shown and kept in report.json."""
        measured = dict(self._measured)
        own = process_memory().peak
        measured["peak_ram_bytes"] = self._peak + own
        predicted = {} if self.plan.predicted is None else self.plan.predicted.model_dump(mode="json")
        rows = {
            key: {"predicted": predicted[key], "measured": measured[key]}
            for key in REPORTED
            if key in predicted and key in measured
        }
        record = {"format": 1, "budget_bytes": self.plan.budget_bytes, "terms": rows}
        self.folder.write(self.folder.report, json.dumps(record, indent=2) + "\n")
        steps = int(measured.get("steps", 0))
        log = read_log(self.folder.log)
        self.show.comparison(self.plan.budget_bytes, rows, steps, self.folder.final, log)


REPORTED = (
    "step_seconds",
    "compute_seconds",
    "update_seconds",
    "disk_seconds",
    "exposed_io_seconds",
    "disk_bytes_read_per_step",
    "disk_bytes_written_per_step",
    "peak_ram_bytes",
)
"""Terms of a prediction that a run measures."""


def _child_variables(environment: Environment, plan: Plan) -> dict[str, str]:
    return environment.of_child(OMP_NUM_THREADS=str(plan.numerics.threads), TOKENIZERS_PARALLELISM="false")
