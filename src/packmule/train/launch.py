"""The parent of a run: parse, probe, prepare, plan, start the child, watch it. Loads no torch."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packmule.checkpoint.head import Head
from packmule.checkpoint.lock import RunLock
from packmule.data.prepare import PrepareReport, PrepareRequest
from packmule.errors import ConfigError, DamagedFile, DiskError
from packmule.plan.explain import explain
from packmule.plan.search import Found, search
from packmule.plan.situation import Situation
from packmule.probe import load as load_hardware
from packmule.shapes.model import ModelShape
from packmule.spec.environment import Environment
from packmule.spec.hardware import Hardware
from packmule.spec.job import Job, changed_promises
from packmule.spec.plan import Numerics, Plan
from packmule.spec.units import format_bytes
from packmule.train.folder import RunFolder
from packmule.train.memory import process_memory
from packmule.train.messages import Request
from packmule.train.show import Show
from packmule.train.situation import make_numerics, make_situation, total_steps
from packmule.train.watch import run_child

RESERVE = 8 << 20
"""What this process may still grow by while it watches."""

TOKENIZER_FACTOR = 16
"""Resident bytes of a loaded tokenizer per byte of its tokenizer.json (M: SmolLM2's 3.5 MB)."""

Progress = Callable[[str, float], None]


@dataclass(frozen=True)
class Planned:
    """What planning found, for the command line.

    Attributes:
        plan: the plan chosen.
        found: the search it came from.
        situation: what it was asked.
    """

    plan: Plan
    found: Found
    situation: Situation

    def explain(self) -> str:
        """Why this plan, as text."""
        return explain(self.situation, self.found)

    def write(self, path: str) -> None:
        """The plan as JSON.

        Raises:
            DiskError: it cannot be written.
        """
        try:
            Path(path).write_text(self.plan.to_json(), encoding="utf-8")
        except OSError as error:
            raise DiskError(f"{path} cannot be written: {error.strerror}.", "choose another --output") from None


def make_plan(job: Job, environment: Environment, progress: Progress) -> Planned:
    """Plan a job without running it; data is not read.

    Raises:
        PackmuleError: see the parts; DoesNotFit when nothing fits.
    """
    hardware = _hardware(job, environment, progress)
    shape = shape_of(Path(job.model.path).expanduser())
    numerics = make_numerics(job, hardware, total_steps(job, None))
    positions = 0 if job.train.sample_prompt is None else 64 + job.train.sample_tokens
    situation = make_situation(job, shape, hardware, _budget(job, hardware), None, numerics, False, positions)
    found = search(_with_own_memory(situation, 0))
    return Planned(found.plan, found, situation)


def train(job: Job, environment: Environment, renumber: bool, quiet: bool, json_lines: bool) -> int:
    """Run a job, or carry on with it.

    Returns:
        0; every other end is an exception with its exit code.

    Raises:
        PackmuleError: see the parts.
    """
    folder = RunFolder.of(job)
    folder.make()
    show = Show(quiet=quiet, json_lines=json_lines, color=not environment.no_color)
    with RunLock(folder.path) as lock, show:
        run = _Start(job, environment, folder, show, renumber)
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

    def prepare(self) -> Request:
        """Everything up to the child's start."""
        job, folder, show = self.job, self.folder, self.show
        head = self._head()
        hardware = _hardware(job, self.environment, show.fraction)
        show.machine(hardware)
        report = self._prepare_data()
        shape = folder.shape()
        steps = total_steps(job, report)
        numerics = make_numerics(job, hardware, steps)
        if head is not None:
            numerics = self._numerics_of(head, numerics)
        positions = len(report.sample_ids) + job.train.sample_tokens if report.sample_ids else 0
        situation = make_situation(
            job, shape, hardware, _budget(job, hardware), report, numerics,
            head is not None and not self.renumber, min(positions, shape.max_positions),
        )  # fmt: skip
        tokenizer = self._tokenizer_bytes() if positions else 0
        situation = _with_own_memory(situation, tokenizer)
        show.phase("plan")
        found = search(situation)
        self.plan = found.plan
        self._check_disk(situation, head)
        folder.write(folder.config, job.to_yaml())
        folder.write(folder.plan, self.plan.to_json())
        folder.write(folder.probe, hardware.to_json())
        show.plan(situation, found, report, head.step if head else 0)
        return Request(
            work="train",
            folder=str(folder.path),
            state=str(folder.state),
            data=str(folder.data),
            ram_bytes=situation.budget_bytes - own_memory(situation.hardware),
            total_steps=steps,
            sample_ids=report.sample_ids,
            positions=situation.sample_tokens,
            evaluation_rows=situation.evaluation_rows,
            mean_length=situation.mean_length,
        )

    def _head(self) -> Head | None:
        """The commit to resume from, after checking that this job may."""
        job, folder = self.job, self.folder
        known = folder.config.exists()
        try:
            head = folder.head()
        except DamagedFile:
            # The child goes back to the newest snapshot; numerics are then the plan's.
            head = None
            if not known:
                raise
        if job.checkpoint.resume == "never" and head is not None:
            raise ConfigError(
                f"{folder.path} holds a run at step {head.step}, and resume is `never`.",
                "use another --output-dir, or --resume auto to carry on",
            )
        if job.checkpoint.resume not in ("auto", "never"):
            raise ConfigError(
                f"`checkpoint.resume` = {job.checkpoint.resume!r}: starting from another folder is not offered.",
                "use `auto`: the output folder's own last commit is resumed",
            )
        if known and head is not None:
            changed = changed_promises(folder.job(), job)
            if changed:
                raise ConfigError(
                    f"{folder.path} holds a run of another job: {'; '.join(changed)}.",
                    "restore these values to carry on, or use another --output-dir",
                )
        return head

    def _numerics_of(self, head: Head, fresh: Numerics) -> Numerics:
        """The run's numerics, if this machine still computes the same bits."""
        kept = head.numerics
        if self.renumber:
            return fresh
        changed = [
            f"{key} was {getattr(kept, key)!r}, is {getattr(fresh, key)!r}"
            for key in ("precision", "threads", "kernels", "torch", "cpu_features", "clip", "optimizer", "schedule")
            if getattr(kept, key) != getattr(fresh, key)
        ]
        if changed:
            raise ConfigError(
                f"The run in {self.folder.path} was computed with other numerics: {'; '.join(changed)}.",
                "restore them, or add --renumber to carry on with slightly different rounding",
            )
        return kept

    def _prepare_data(self) -> PrepareReport:
        job = self.job
        request = PrepareRequest(
            model=job.model.path,
            dataset=job.data.path,
            max_seq_length=job.train.max_seq_length,
            val_size=float(job.data.val_size),
            seed=job.train.seed,
            out=str(self.folder.path),
            random_init=job.model.init == "random",
            sample_prompt=job.train.sample_prompt or "",
        )
        self.show.phase("prepare data")
        run_child(
            "packmule.data.prepare", request.model_dump_json(), self.on_event, self.environment.of_child()
        )
        return PrepareReport.parse(self._report, "data preparation")

    def _tokenizer_bytes(self) -> int:
        return TOKENIZER_FACTOR * (self.folder.model / "tokenizer.json").stat().st_size

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
        self.show.comparison(self.plan.budget_bytes, rows)


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


def own_memory(hardware: Hardware) -> int:
    """What the parent takes of the budget: measured, as the planner counted it."""
    return hardware.parent_baseline_bytes


def _with_own_memory(situation: Situation, tokenizer: int) -> Situation:
    """Count this very process instead of the probe's stand-in, and the child's tokenizer."""
    from dataclasses import replace

    hardware = situation.hardware
    own = max(hardware.parent_baseline_bytes, process_memory().peak + RESERVE)
    changed = hardware.model_copy(
        update={
            "parent_baseline_bytes": own,
            "child_baseline_bytes": hardware.child_baseline_bytes + tokenizer,
        }
    )
    return replace(situation, hardware=changed)


def _hardware(job: Job, environment: Environment, progress: Progress) -> Hardware:
    threads = None if job.hardware.threads == "auto" else int(job.hardware.threads)
    disk = job.hardware.disk_path or job.train.output_dir
    return load_hardware(
        environment.cache / "probe.json", Path(disk).expanduser().absolute(), threads=threads, progress=progress
    )


def _budget(job: Job, hardware: Hardware) -> int:
    """The budget asked for, or what is available now.

    Raises:
        ConfigError: more than the machine has.
    """
    available = hardware.ram_available_bytes
    if job.hardware.ram == "auto":
        return int(available * 0.9)
    asked = int(job.hardware.ram)
    if asked > hardware.ram_total_bytes:
        raise ConfigError(
            f"`hardware.ram` = {format_bytes(asked)} is more than this machine has "
            f"({format_bytes(hardware.ram_total_bytes)}, of which {format_bytes(available)} are available).",
            f"use at most {format_bytes(available)}",
        )
    if asked > available:
        print(
            f"note: only {format_bytes(available)} of RAM are available now ({hardware.ram_limit_source}), "
            f"less than the budget of {format_bytes(asked)}",
            file=sys.stderr,
        )
    return asked


def _child_variables(environment: Environment, plan: Plan) -> dict[str, str]:
    # Passive: a spinning OpenMP worker would take a core from our own pool between two matmuls.
    return environment.of_child(
        OMP_NUM_THREADS=str(plan.numerics.threads), OMP_WAIT_POLICY="passive", TOKENIZERS_PARALLELISM="false"
    )


def shape_of(model: Path) -> ModelShape:
    """The architecture of a model that is not prepared yet."""
    from packmule.data.gguf import read_gguf
    from packmule.data.gguf_config import gguf_config

    if model.is_dir():
        path = model / "config.json"
        try:
            config = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ConfigError(f"{model} has no config.json.", "give a Hugging Face folder or a .gguf file") from None
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path} cannot be read: {error}.", "restore it") from None
        return ModelShape.from_config(config, str(path))
    if not model.exists():
        raise ConfigError(f"model {model} does not exist.", "give a Hugging Face folder or a .gguf file")
    return ModelShape.from_config(gguf_config(read_gguf(model)), str(model))
