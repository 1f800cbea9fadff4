"""From a job, a model and prepared data to a planning problem. No torch."""

from __future__ import annotations

import math
from importlib.metadata import version

from packmule.data.prepare import PrepareReport
from packmule.errors import ConfigError, DataError
from packmule.graph.costs import Costs
from packmule.kernels import native
from packmule.plan.situation import Situation
from packmule.shapes.bodies import DTYPES
from packmule.shapes.model import ModelShape
from packmule.spec.hardware import Hardware
from packmule.spec.job import Job
from packmule.spec.plan import CheckpointPlan, Numerics, OptimizerNumerics, ScheduleNumerics

UNKNOWN_MEAN_LENGTH_SHARE = 0.5
"""Without data, documents are taken to be half a row long on average."""


def total_steps(job: Job, report: PrepareReport | None) -> int:
    """Optimizer steps of the whole run.

    Raises:
        ConfigError: it follows from the data, and there is none.
    """
    train = job.train
    if train.max_steps is not None:
        return train.max_steps
    if report is None:
        if train.max_tokens is not None:
            return max(1, math.ceil(train.max_tokens / (train.global_batch_size * train.max_seq_length)))
        return 1000  # only the length of the run depends on it
    rows = report.train.rows
    if train.max_tokens is not None:
        per_row = report.train.targets / rows
        return max(1, math.ceil(train.max_tokens / (per_row * train.global_batch_size)))
    return max(1, math.ceil((train.epochs or 1.0) * rows / train.global_batch_size))


def make_numerics(job: Job, hardware: Hardware, steps: int) -> Numerics:
    """What a fresh run computes, with one micro-batch; the search cuts it."""
    optim, train = job.optim, job.train
    threads = hardware.threads if job.hardware.threads == "auto" else int(job.hardware.threads)
    return Numerics(
        precision=train.resolved_precision(hardware.cpu_features),
        micro_rows=(train.global_batch_size,),
        max_seq_length=train.max_seq_length,
        loss_chunk=512,
        clip=optim.max_grad_norm,
        optimizer=OptimizerNumerics(
            beta1=optim.adam_beta1,
            beta2=optim.adam_beta2,
            eps=optim.adam_epsilon,
            weight_decay=optim.weight_decay,
        ),
        schedule=ScheduleNumerics(
            kind=optim.lr_scheduler,
            learning_rate=optim.learning_rate,
            minimum=optim.min_lr,
            warmup_steps=optim.warmup(steps),
            total_steps=steps,
        ),
        seed=train.seed,
        threads=threads,
        kernels="torch" if native.library_path() is None else "native",
        torch=version("torch"),
        cpu_features=hardware.cpu_features,
    )


def make_situation(
    job: Job,
    shape: ModelShape,
    hardware: Hardware,
    budget: int,
    report: PrepareReport | None,
    numerics: Numerics,
    fixed: bool,
    positions: int,
) -> Situation:
    """The planning problem of a job.

    Args:
        report: what data preparation found; None when only planning.
        numerics: as `make_numerics`, or those of the run that is resumed.
        fixed: numerics may not change.
        positions: of a sample, prompt included.

    Raises:
        ConfigError: rows longer than the model's positions.
        DataError: nothing to train on.
    """
    length = numerics.max_seq_length
    if length > shape.max_positions:
        raise ConfigError(
            f"`train.max_seq_length` = {length} is more than the model's {shape.max_positions} positions.",
            f"use at most {shape.max_positions}",
        )
    if report is not None and report.train.targets == 0:
        raise DataError("The data has no token to predict: every document is a single token.", "use longer texts")
    mean = length * UNKNOWN_MEAN_LENGTH_SHARE if report is None else report.train.mean_length_by_token
    train, checkpoint = job.train, job.checkpoint
    validation = 0 if report is None or report.validation is None else report.validation.rows
    return Situation(
        shape=shape,
        hardware=hardware,
        costs=Costs.of(hardware, DTYPES[numerics.precision].compute, hardware.disks[0]),
        budget_bytes=budget,
        numerics=numerics,
        fixed=fixed,
        micro_rows=None if train.micro_batch_size == "auto" else int(train.micro_batch_size),
        recompute=None if train.recompute == "auto" else bool(train.recompute),
        update=None if train.update == "auto" else train.update,
        wishes=job.hardware,
        checkpoint=CheckpointPlan(
            commit_steps=1 if checkpoint.commit_steps == "auto" else int(checkpoint.commit_steps),
            snapshot_steps=checkpoint.save_steps,
            snapshots_kept=checkpoint.save_total_limit,
        ),
        commit_auto=checkpoint.commit_steps == "auto",
        mean_length=mean,
        evaluation_rows=min(validation, train.eval_rows or validation),
        sample_tokens=positions,
        disk_free_bytes=hardware.disks[0].free_bytes,
        total_steps=numerics.schedule.total_steps,
    )
