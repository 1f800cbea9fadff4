"""Planning a job without running it: what `packmule plan` finds and prints. Loads no torch."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path
from typing import Any

from packmule.data.report import PrepareReport, PreviewReport
from packmule.errors import DiskError
from packmule.plan.explain import tables
from packmule.plan.search import Found, search
from packmule.plan.situation import Situation
from packmule.plan.table import Table, plain
from packmule.plan.wear import wear
from packmule.shapes.module import ModuleShape
from packmule.spec.environment import Environment
from packmule.spec.job import Job
from packmule.spec.plan import Plan
from packmule.spec.units import format_bytes, format_seconds
from packmule.train.data import preview_data, preview_tables
from packmule.train.modules import (
    check_build,
    check_measured,
    measure_modules,
    module_tables,
    origin_of,
    samples_report,
)
from packmule.train.situation import (
    hardware_of,
    make_numerics,
    make_situation,
    model_folder,
    ram_budget,
    refuse_unoffered,
    shape_of,
    tokenizer_bytes,
    total_steps,
    with_own_memory,
)

Progress = Callable[[str, float], None]


@dataclass(frozen=True, repr=False)
class Planned:
    """What planning found. `str` is what `packmule plan` prints.

    Attributes:
        plan: the plan chosen.
        found: the search it came from.
        situation: what it was asked.
        steps: of the run, where the job says it without looking at data.
        data: the formats of the data and an example of each, or why there are none; or how many samples
            modules of one's own have.
    """

    plan: Plan
    found: Found
    situation: Situation
    steps: int | None
    data: PreviewReport | PrepareReport | str

    def tables(self) -> list[Table]:
        """What the plan is, and why, and what the data looks like."""
        shape = self.situation.shape
        if isinstance(shape, ModuleShape) and isinstance(self.data, PrepareReport):
            data = module_tables(shape, self.data)
        else:
            assert not isinstance(self.data, PrepareReport)
            data = preview_tables(self.data)
        return [*tables(self.situation, self.found, self.steps), *data]

    def shown_json(self) -> str:
        """The plan, with the data's formats and examples as `data`, or a string there that says why not; and
        `wear`, null where the number of steps is not known."""
        data: Any = self.data
        if isinstance(data, PreviewReport):
            data = data.model_dump(mode="json")["sources"]
        elif isinstance(data, PrepareReport):
            data = data.model_dump(mode="json")
        found = None if self.steps is None else asdict(wear(self.situation, self.plan, self.steps))
        return json.dumps({**json.loads(self.plan.to_json()), "wear": found, "data": data}, indent=2) + "\n"

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
    if job.model.factory is not None:
        return _plan_modules(job, environment, progress)
    shape = shape_of(Path(job.model.source).expanduser())
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
    tokenizer = tokenizer_bytes(model_folder(job.model.source), shape) if positions else 0
    found = search(with_own_memory(situation, tokenizer))
    return Planned(found.plan, found, situation, job.train.max_steps, preview_data(job, environment))


def _plan_modules(job: Job, environment: Environment, progress: Progress) -> Planned:
    """Plan for modules of the user's own, which are built and measured for it."""
    hardware = hardware_of(job, environment, progress)
    budget = ram_budget(job, hardware)

    def note(event: dict[str, Any]) -> None:
        if event["event"] == "progress":
            progress(event["phase"], event["done"] / event["total"])

    origin = origin_of(job)
    shape = measure_modules(job, hardware, budget, None, environment, note)
    check_measured(job, origin, shape)
    report = samples_report(shape, job)
    steps = total_steps(job, report)
    numerics = make_numerics(job, hardware, steps)
    situation = make_situation(job, shape, hardware, budget, report, numerics, False, 0)
    counted = with_own_memory(situation, 0)
    check_build(counted)
    found = search(counted)
    return Planned(found.plan, found, situation, steps, report)
