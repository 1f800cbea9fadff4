"""A user's own modules, seen from the parent: what they are measured to take, what has changed, what people
are shown of their data. No torch."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path, PurePath
from typing import Any

from packmule.data.report import NamedRows, PrepareReport
from packmule.data.rows import RowsMeta, validation_documents
from packmule.errors import ConfigError, DoesNotFit, OutOfMemory
from packmule.plan.candidates import splits
from packmule.plan.outside import STAGING_BYTES
from packmule.plan.situation import Situation
from packmule.plan.table import Table
from packmule.shapes.module import ModuleShape, TensorRecord
from packmule.spec.environment import Environment
from packmule.spec.hardware import Hardware
from packmule.spec.job import Job
from packmule.spec.plan import Numerics
from packmule.spec.units import format_bytes
from packmule.train.folder import HELD_OUT, RunFolder
from packmule.train.memory import process_memory
from packmule.train.messages import GaugeRequest
from packmule.train.situation import WATCH_BYTES, evaluation_names, judges, precision_of, threads_of
from packmule.train.stopping import check_metric
from packmule.train.watch import run_child

RESTORE = "restore the code the run began with, or begin another run in another --output-dir"


def measure_modules(
    job: Job,
    hardware: Hardware,
    budget: int,
    kept: Numerics | None,
    environment: Environment,
    on_event: Callable[[dict[str, Any]], None],
) -> ModuleShape:
    """Build and measure in a process of its own.

    Args:
        budget: of the whole process tree.
        kept: numerics that are gone on with; None where they are still to choose.
        on_event: gets its progress.

    Raises:
        PackmuleError: see packmule.train.gauge.
    """
    assert job.model.factory is not None and job.data.factory is not None
    threads, train = threads_of(job, hardware), job.train
    variables = environment.of_child(OMP_NUM_THREADS=str(threads))
    wanted = None if train.micro_batch_size == "auto" else int(train.micro_batch_size)
    left = micro_sizes(splits(train.global_batch_size, wanted) if kept is None else [kept.micro_rows])
    while True:
        request = GaugeRequest(
            model=job.model.factory,
            arguments=job.model.arguments,
            dataset=job.data.factory,
            dataset_arguments=job.data.arguments,
            precision=precision_of(job, hardware),
            rows=left,
            seed=train.seed,
            threads=threads,
            ram_bytes=budget - process_memory().peak - WATCH_BYTES,
            import_path=import_path(),
            validation=job.data.val_factory,
            validation_arguments=job.data.val_arguments,
        )
        report: dict[str, Any] = {}
        done = 0

        def note(event: dict[str, Any], report: dict[str, Any] = report) -> None:
            nonlocal done
            if event["event"] == "report":
                report.update(event["report"])
                return
            if event["event"] == "progress":
                done = event["done"]
            on_event(event)

        try:
            run_child("packmule.train.gauge", request.model_dump_json(), note, variables)
        except OutOfMemory as error:
            # A library that is refused memory may end the process: what came before is measured again.
            if not done:
                raise DoesNotFit(error.cause, "raise --ram, or lower --micro-batch-size") from None
            left = left[:done]
            continue
        return ModuleShape.parse(report, "the measurement of the model")


def import_path() -> tuple[str, ...]:
    """Where this process imports from, for a child that shall find the same modules."""
    return tuple(os.path.abspath(path) for path in sys.path)


def import_from(paths: Sequence[str]) -> None:
    """Look for modules there too."""
    sys.path += [path for path in paths if path not in sys.path]


def check_imports(shape: ModuleShape, allowed: Sequence[str]) -> None:
    """Nothing is imported because a run's folder names it: only what the caller names too.

    Raises:
        ConfigError: names what has to be imported and is not allowed.
    """
    factories = [shape.factory, shape.dataset]
    if shape.validation is not None:
        factories.append(shape.validation.dataset)
    needed = dict.fromkeys(factory.rpartition(":")[0] for factory in factories)
    missing = [module for module in needed if module not in allowed]
    if missing:
        first, last = ", ".join(f"`{factory}`" for factory in factories[:-1]), f"`{factories[-1]}`"
        raise ConfigError(
            f"This run was trained with {first} and {last}, which have to be imported.",
            f"if they are yours, say so: {' '.join(f'--import {module}' for module in missing)}",
        )


def micro_sizes(cuts: Iterable[Sequence[int]]) -> tuple[int, ...]:
    """Every size of micro-batch in some ways to cut a step, and one sample, smallest first."""
    return tuple(sorted({size for cut in cuts for size in cut} | {1}))


def refuse_changed(before: ModuleShape, now: ModuleShape) -> None:
    """Raise ConfigError where the modules are not those that a run began with."""
    changed = first_difference(before, now)
    if changed:
        raise ConfigError(f"{changed}.", RESTORE)


def origin_of(job: Job) -> ModuleShape | None:
    """The modules of the run that another one's weights are taken from; None where that is not asked for.

    Raises:
        ConfigError: `model.path` names no run of modules of one's own.
    """
    path = job.model.path
    if path is None:
        return None
    run = RunFolder.at(Path(path))
    shape = None if run is None else run.module_shape()
    if shape is None:
        what = "no run" if run is None else "a run of a model that reads text"
        raise ConfigError(
            f"`model.path` = {path!r} is {what}.",
            "beside `model.factory` give a run of the same modules, or leave it out",
        )
    return shape


def check_measured(job: Job, origin: ModuleShape | None, shape: ModuleShape) -> None:
    """What a job asks that depends on what its modules are.

    Args:
        origin: of a fresh run, as `origin_of`.

    Raises:
        ConfigError: the weights are of other modules, or `train.best_metric` is nothing that they report.
    """
    changed = "" if origin is None else first_difference(origin, shape)
    if changed:
        raise ConfigError(
            f"The weights in `model.path` = {job.model.path!r} are of other modules: {changed}.",
            "give a run of the same modules, or leave it out",
        )
    if judges(job):
        check_metric(job.train.best_metric, evaluation_names(job), shape.metrics)


def first_difference(before: ModuleShape, now: ModuleShape) -> str:
    """The first difference between two models' blocks and parameters, in words; "" where there is none."""
    if len(before.parts) != len(now.parts):
        was, found = len(before.parts) - 2, len(now.parts) - 2
        return f"`{now.factory}` gives {found} blocks, and gave {was}"
    pairs = zip(before.parts, now.parts, strict=True)
    differences = (difference(new.name, old.parameters, new.parameters) for old, new in pairs)
    return next(filter(None, differences), "")


def difference(part: str, before: Sequence[TensorRecord], now: Sequence[TensorRecord]) -> str:
    """The first difference between a block's parameters, in words; "" where there is none."""
    old, new = ({record.name: record for record in records} for records in (before, now))
    for name in [*old, *new]:
        if name not in new:
            return f"`{part}` has no parameter `{name}`, which it had"
        if name not in old:
            return f"`{part}` has a parameter `{name}`, which it had not"
        if old[name] != new[name]:
            return f"`{part}.{name}` is {_told(new[name])}, and was {_told(old[name])}"
    return "" if [*old] == [*new] else f"the parameters of `{part}` come in another order"


def _told(record: TensorRecord) -> str:
    also = f", also `{record.aliases[0]}`" if record.aliases else ""
    return f"{list(record.shape)} ({record.role}{also})"


def check_build(situation: Situation) -> None:
    """Raise DoesNotFit where the modules cannot be built within the budget."""
    shape, hardware = situation.shape, situation.hardware
    assert isinstance(shape, ModuleShape)
    base = hardware.parent_baseline_bytes + hardware.child_baseline_bytes
    needed = base + shape.build_bytes + STAGING_BYTES
    if needed > situation.budget_bytes:
        less = "; functions that make one block each, in place of blocks, take less (docs/modules.md)"
        if shape.build_bytes < 2 * max(block.numel for block in shape.blocks()) * 4:
            less = ""  # it is the largest block that takes it, or next to nothing
        raise DoesNotFit(
            f"Making the modules takes {format_bytes(needed)} of RAM; the budget is "
            f"{format_bytes(situation.budget_bytes)}.",
            f"--ram {format_bytes(needed * 1.01).replace(' ', '')} is enough{less}",
        )


def data_key(shape: ModuleShape) -> str:
    """Names a data set by what it was made from and its length; a file that was moved is the same file."""
    made = {
        "factory": PurePath(shape.dataset).name,
        "arguments": shape.dataset_arguments,
        "samples": shape.samples,
    }
    return hashlib.sha256(json.dumps(made, sort_keys=True).encode()).hexdigest()


def samples_report(shape: ModuleShape, job: Job) -> PrepareReport:
    """The data as data preparation reports it: a sample is a document, and a row, of one token."""
    held_out = int(validation_documents(shape.samples, job.data.held_out, job.train.seed).sum())
    judged = held_out if shape.validation is None else shape.validation.samples

    def meta(count: int) -> RowsMeta:
        return RowsMeta(
            max_seq_length=1,
            documents=count,
            documents_cut=0,
            pieces=count,
            pieces_dropped=0,
            rows=count,
            tokens=count,
            targets=max(1, round(count * shape.mean_targets)),
            longest=1,
            mean_length_by_token=1.0,
        )

    return PrepareReport(
        documents=shape.samples,
        tokens=shape.samples,
        train=meta(shape.samples - held_out),
        validation=(NamedRows(name=HELD_OUT, rows=meta(judged)),) if judged else (),
        train_fill_percent=100.0,
        reused=False,
        seconds=0.0,
        peak_ram_bytes=None,
    )


def module_tables(shape: ModuleShape, report: PrepareReport) -> list[Table]:
    """What people are shown of the modules and their data."""
    held_out = sum(found.rows.rows for found in report.validation)
    judged = ("held out", f"{held_out:,} samples" if held_out else "nothing")
    if shape.validation is not None:
        judged = ("validation data set", f"{shape.validation.dataset}: {shape.validation.samples:,} samples")
    rows = [
        ("modules", f"{shape.factory}: {shape.numel:,} parameters in {len(shape.parts)} blocks"),
        *((_names(shape, kind), _cost(shape, kind)) for kind in range(len(shape.costs))),
        ("data set", f"{shape.dataset}: {shape.samples:,} samples"),
        ("training samples", f"{report.train.rows:,}"),
        judged,
    ]
    return [Table("modules and samples", tuple(rows))]


def _names(shape: ModuleShape, kind: int) -> str:
    """The blocks of a kind, as a range where they follow each other."""
    found = [index for index, part in enumerate(shape.parts) if part.kind == kind]
    first, last = shape.parts[found[0]].name, shape.parts[found[-1]].name
    if len(found) == 1:
        return first
    if found == list(range(found[0], found[-1] + 1)):
        return f"{first} to {last}"
    return f"{first}, ..., {last} ({len(found)} blocks)"


def _cost(shape: ModuleShape, kind: int) -> str:
    most = shape.costs[kind][-1]
    memory = format_bytes(most.backward_bytes)
    return (
        f"at {most.rows} samples {memory} and {1e3 * most.backward_seconds:,.1f} ms to train, besides weights"
    )
