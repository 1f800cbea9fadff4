"""The parent of a run: parse, probe, prepare, plan, start the child, watch it. Loads no torch."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from packmule.checkpoint.lock import RunLock
from packmule.data.report import PrepareReport
from packmule.errors import ConfigError, DiskError, OutOfMemory
from packmule.plan.search import Found, search
from packmule.plan.situation import Situation
from packmule.plan.wear import refuse_wear
from packmule.shapes.model import ModelShape
from packmule.shapes.module import ModuleShape, Shape
from packmule.spec.environment import Environment
from packmule.spec.hardware import Hardware
from packmule.spec.job import Job
from packmule.spec.plan import Plan
from packmule.spec.resume import changes
from packmule.spec.units import format_bytes
from packmule.train.data import prepare_request
from packmule.train.folder import RunFolder, read_log
from packmule.train.memory import process_memory
from packmule.train.messages import Request
from packmule.train.modules import (
    check_build,
    check_measured,
    data_key,
    import_path,
    measure_modules,
    origin_of,
    refuse_changed,
    samples_report,
)
from packmule.train.resuming import DataStart, data_of, data_start, find, numerics_of, said
from packmule.train.show import SAMPLES, Show
from packmule.train.sinks import Sinks, import_sinks
from packmule.train.situation import (
    WATCH_BYTES,
    check_inputs,
    hardware_of,
    make_numerics,
    make_situation,
    ram_budget,
    refuse_unoffered,
    smaller_vocabulary,
    text_positions,
    tokenizer_bytes,
    total_steps,
    with_own_memory,
)
from packmule.train.stopping import stops
from packmule.train.watch import interruptible, run_child


def _search(situation: Situation, tokenizer: int) -> tuple[Situation, Found]:
    """Search with this process's memory counted, and what searching will take of it; once more should it
    have taken more."""
    counted = with_own_memory(situation, tokenizer)
    found = search(counted)
    grown = with_own_memory(situation, tokenizer, WATCH_BYTES)
    if grown.hardware.parent_baseline_bytes <= counted.hardware.parent_baseline_bytes:
        return counted, found
    return grown, search(grown)


def train(
    job: Job, environment: Environment, renumber: bool, yes: bool, quiet: bool, json_lines: bool
) -> int:
    """Run a job, or carry on with it.

    Args:
        renumber: though its numerics are others than the run's.
        yes: though it takes much of the disk's life.

    Returns:
        0; every other end is an exception with its exit code.

    Raises:
        PackmuleError: see the parts.
    """
    began = time.monotonic()
    refuse_unoffered(job)
    folder = RunFolder.of(job)
    if not folder.config.exists():
        check_inputs(job)
    folder.make()
    show = Show(quiet=quiet, json_lines=json_lines, color=not environment.no_color)
    modules = import_sinks(job.logging.report_to)
    with interruptible(), RunLock(folder.path) as lock, show, Sinks(modules, job, folder, show.note) as sinks:
        run = _Start(job, environment, folder, show, sinks, renumber, yes, began)
        if run.complete():
            return 0
        request: Request | None = run.prepare()
        while request is not None:
            show.phase("start")
            try:
                run_child(
                    "packmule.train.child",
                    request.model_dump_json(),
                    run.on_event,
                    _child_variables(environment, run.plan),
                    (lock.fileno(),),
                )
                request = None
            except OutOfMemory as error:
                request = run.split(error)
        run.finish()
    return 0


LOGGED = ("step", "evaluation", "done")
"""Events that follow new entries of the log."""

SPLITTING = ("step", "evaluation")
"""Phases whose memory grows with the rows of a micro-batch."""


class _Start:
    """One start of a run: from the job to the child's request, then its events."""

    def __init__(
        self,
        job: Job,
        environment: Environment,
        folder: RunFolder,
        show: Show,
        sinks: Sinks,
        renumber: bool,
        yes: bool,
        began: float,
    ) -> None:
        self.job = job
        self.environment = environment
        self.folder = folder
        self.show = show
        self.sinks = sinks
        self.renumber = renumber
        self.yes = yes
        self.began = began
        self.plan: Plan
        self._situation: Situation
        self._request: Request
        self._phase = ""
        self._report: dict[str, Any] = {}
        self._measured: dict[str, Any] = {}
        self._peak = 0
        self._found = find(job, folder)

    def complete(self) -> bool:
        """Whether there is nothing left to do; says so."""
        found, folder = self._found, self.folder
        head = found.head
        if head is None or not found.whole or not folder.final.exists():
            return False
        if found.before is not None and changes(found.before, self.job, ("said",)):
            return False
        total = head.numerics.schedule.total_steps
        log = [entry for entry in read_log(folder.log) if entry["step"] <= head.step]
        over = head.step >= total or stops(log, self.job.train)
        if not over or not any(entry["step"] == head.step for entry in log):
            return False
        unit = "tokens" if self.job.model.factory is None else SAMPLES
        self.show.complete(head.step, total, folder.final, log, unit)
        return True

    def prepare(self) -> Request:
        """Everything up to the child's start."""
        job, folder, show, found = self.job, self.folder, self.show, self._found
        hardware = hardware_of(job, self.environment, show.fraction)
        show.machine(hardware)
        budget = ram_budget(job, hardware)
        shape, report, data = self._model_and_data(hardware, budget)
        steps = total_steps(job, report, data.cursor, data.tokens)
        if steps < found.step:
            raise ConfigError(
                f"The run in {folder.path} has done {found.step} steps; this job ends after {steps}.",
                f"train at least {found.step} steps, or export an earlier checkpoint-N of it",
            )
        fresh = make_numerics(job, hardware, steps)
        numerics = numerics_of(found, job, fresh, self.renumber)
        positions = 0
        if isinstance(shape, ModelShape):
            positions = text_positions(report.sample_ids, job.train.sample_tokens, shape)
        situation = make_situation(
            job, shape, hardware, budget, report, numerics,
            found.head is not None and not self.renumber, positions,
        )  # fmt: skip
        if found.head is not None:
            situation = replace(situation, vocabulary_parts=numerics.vocabulary_parts)
        tokenizer = 0
        if isinstance(shape, ModelShape):
            situation = replace(situation, smaller=lambda: smaller_vocabulary(job, folder))
            tokenizer = tokenizer_bytes(folder.model, shape) if positions else 0
        show.phase("plan")
        if isinstance(shape, ModuleShape):
            check_build(with_own_memory(situation, 0))
        situation, plans = _search(situation, tokenizer)
        self.plan = plans.plan
        self._check_disk(situation)
        if not self.yes:
            refuse_wear(situation, self.plan, steps - found.step)
        changed = said(found, job, fresh, data)
        for line in changed:
            show.note(line)
        if found.elsewhere is not None:
            folder.take_log(found.elsewhere, found.step)
        self._request = Request(
            work="train",
            folder=str(folder.path),
            state=str(folder.state),
            data=str(folder.data),
            ram_bytes=0,
            total_steps=steps,
            sample_ids=report.sample_ids,
            positions=situation.sample_tokens,
            evaluation_rows=situation.evaluation_rows,
            mean_length=situation.mean_length,
            weights=self._weights(),
            begin_with="" if found.elsewhere is None else str(found.elsewhere.state),
            data_key=data.key,
            data_cursor=data.cursor,
            data_tokens=data.tokens,
            seconds=self._seconds(),
            changed=tuple(changed),
            import_path=() if job.model.factory is None else import_path(),
            val_size=job.data.held_out,
        )
        folder.write(folder.config, job.to_yaml())
        return self._planned(situation, plans)

    def _model_and_data(self, hardware: Hardware, budget: int) -> tuple[Shape, PrepareReport, DataStart]:
        """Prepare both, and show them."""
        job, folder, found = self.job, self.folder, self._found
        if job.model.factory is None:
            folder.module.unlink(missing_ok=True)
            report = self._prepare_data(budget)
            self.show.data(report)
            return folder.decoder_shape(), report, data_of(found, folder)
        self.show.phase("measure the model")
        origin = origin_of(job) if found.head is None else None
        kept = None if found.head is None or self.renumber else found.head.numerics
        shape = measure_modules(job, hardware, budget, kept, self.environment, self.on_event)
        before = folder.module_shape() if found.elsewhere is None else found.elsewhere.module_shape()
        if found.head is not None and before is not None:
            refuse_changed(before, shape)
        check_measured(job, origin, shape)
        folder.model.mkdir(exist_ok=True)
        folder.write(folder.module, shape.to_json())
        report = samples_report(shape, job)
        self.show.samples(shape, report)
        return shape, report, data_start(found, data_key(shape))

    def _weights(self) -> str:
        """The state that a fresh run takes its weights from, where it is another run's."""
        if self.job.model.path is None or self.job.model.init != "pretrained":
            return ""
        origin = RunFolder.at(Path(self.job.model.path))
        return "" if origin is None else str(origin.state)

    def _planned(self, situation: Situation, plans: Found) -> Request:
        """Write the plan down, show it, ask for its execution."""
        self.plan, self._situation = plans.plan, situation
        self.folder.write(self.folder.plan, self.plan.to_json())
        self.folder.write(self.folder.probe, situation.hardware.to_json())
        prompt, steps = self.job.train.sample_prompt or "", self._request.total_steps
        self.show.plan(situation, plans, self._found.step, steps, prompt)
        own = situation.hardware.parent_baseline_bytes
        self._request = self._request.model_copy(update={"ram_bytes": situation.budget_bytes - own})
        return self._request

    def split(self, error: OutOfMemory) -> Request:
        """After an allocation that failed in spite of the plan: the same rows a step in micro-batches
        of half as many, from the last commit, which holds all steps unless an update had begun.

        Raises:
            OutOfMemory: it was not rows that memory was needed for, or they are one at a time already.
            DoesNotFit: no plan for the smaller micro-batches fits.
        """
        numerics = self.plan.numerics
        if self._phase not in SPLITTING:
            raise error
        if max(numerics.micro_rows) == 1:
            enough = format_bytes(-(-self.plan.budget_bytes * 11 // 100_000_000) * 10_000_000)
            raise OutOfMemory(
                f"{error.cause} Rows are computed one at a time already.",
                f"the last commit is kept; run the same command with more memory, like "
                f"--ram {enough.replace(' ', '')}",
            )
        halves = halved(numerics.micro_rows)
        line = (
            f"{error.cause} Going on in micro-batches of {_rows(halves)} rows instead of "
            f"{_rows(numerics.micro_rows)}: the same rows a step, the same weights of their losses; "
            "sums are rounded otherwise."
        )
        self.show.note(line)
        self._found = replace(self._found, head=self.folder.head())
        changed = numerics.model_copy(update={"micro_rows": halves})
        situation = replace(self._situation, numerics=changed, fixed=True)
        self._request = self._request.model_copy(
            update={"changed": (line,), "begin_with": "", "seconds": self._seconds()}
        )
        return self._planned(situation, search(situation))

    def _seconds(self) -> float | None:
        """What is left of the time this start was given."""
        minutes = self.job.train.max_minutes
        return None if minutes is None else max(0.0, 60.0 * minutes - (time.monotonic() - self.began))

    def _prepare_data(self, budget: int) -> PrepareReport:
        request = prepare_request(self.job, self.folder.path, budget - process_memory().peak - WATCH_BYTES)
        self.show.phase("prepare data")
        run_child(
            "packmule.data.prepare", request.model_dump_json(), self.on_event, self.environment.of_child()
        )
        return PrepareReport.parse(self._report, "data preparation")

    def _check_disk(self, situation: Situation) -> None:
        """Refuse before step 1 what would fill the disk later."""
        predicted = self.plan.predicted
        if predicted is None:
            return
        state = predicted.phases[0].disk_bytes
        snapshots = 0
        if self.plan.checkpoint.snapshot_steps:
            snapshots = state // 2 * (self.plan.checkpoint.snapshots_kept + 1)
        if self.job.checkpoint.save_best:
            snapshots += state  # a new one is whole before the old one goes
        needed = (0 if self._found.whole else state) + snapshots + 4 * situation.shape.numel
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
            self._peak = max(self._peak, event.get("peak_bytes", 0))
        elif name == "phase":
            self._phase = event["name"]
        elif name == "start":
            self.sinks.rewind()
        self.show.event(event)
        if name in LOGGED:
            self.sinks.follow()

    def finish(self) -> None:
        """Predicted beside measured, shown and kept in report.json."""
        measured = dict(self._measured)
        own = process_memory().peak
        measured["peak_ram_bytes"] = self._peak + own
        predicted = {} if self.plan.predicted is None else self.plan.predicted.model_dump(mode="json")
        rows = {
            key: {"predicted": predicted[key], "measured": measured[key]}
            for key in (*REPORTED, *(ON_DEVICE if self.plan.device else ()))
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
ON_DEVICE = ("device_seconds", "sent_bytes_per_step", "received_bytes_per_step")
"""Terms of a prediction that a run measures; and those where a device computes."""


def halved(micro_rows: tuple[int, ...]) -> tuple[int, ...]:
    """Each micro-batch as two of half as many rows, in the same order."""
    return tuple(part for rows in micro_rows for part in ((rows + 1) // 2, rows // 2) if part)


def _rows(micro_rows: tuple[int, ...]) -> str:
    return "+".join(map(str, micro_rows))


def _child_variables(environment: Environment, plan: Plan) -> dict[str, str]:
    return environment.of_child(
        OMP_NUM_THREADS=str(plan.numerics.threads),
        TOKENIZERS_PARALLELISM="false",
        CUBLAS_WORKSPACE_CONFIG=":4096:8",  # torch asks for it where results must be the same each time
    )
