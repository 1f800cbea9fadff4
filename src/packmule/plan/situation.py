"""What a planner is told: the job's facts as plain numbers, apart from how they were found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from packmule.graph.costs import Costs
from packmule.shapes.module import Shape
from packmule.spec.hardware import DeviceSpeed, Hardware
from packmule.spec.job import HardwareSection
from packmule.spec.plan import (
    CheckpointPlan,
    Numerics,
    Update,
)


@dataclass(frozen=True)
class Smaller:
    """The same model with its vocabulary cut down to the data.

    Attributes:
        tokens: that stay.
        flag: names it in a job.
        command: makes it.
    """

    tokens: int
    flag: str
    command: str


def _nothing() -> None:
    return None


@dataclass(frozen=True)
class Situation:
    """One planning problem.

    Attributes:
        shape: the model.
        hardware: the machine.
        costs: its rates for the compute dtype and disk.
        budget_bytes: bound on VmHWM of the process tree.
        numerics: what fixes bits, with `micro_rows` and `loss_chunk` still open unless `fixed`.
        fixed: numerics may not be chosen (a run is resumed).
        micro_rows: rows of a micro-batch asked for, or None for any.
        vocabulary_parts: those that the state on disk has already, or None for any.
        recompute: True or False for all layers, or None for any.
        update: the update mode asked for, or None.
        wishes: placements asked for.
        checkpoint: when state becomes durable.
        commit_auto: the planner chooses how often.
        mean_length: tokens per document, weighted by tokens.
        evaluation_rows: rows of each evaluation set.
        sample_tokens: positions of a generated sample, prompt included; 0: none.
        disk_free_bytes: room for state, work and snapshots.
        total_steps: of the whole run.
        device, device_bytes: what computes instead of the cores, and how much of its memory a run may hold.
        smaller: finds out what cutting the vocabulary would leave, or None where that is not known or
            not possible. Asked only for a refusal, since it reads all tokens.
    """

    shape: Shape
    hardware: Hardware
    costs: Costs
    budget_bytes: int
    numerics: Numerics
    fixed: bool
    micro_rows: int | None
    recompute: bool | None
    update: Update | None
    wishes: HardwareSection
    checkpoint: CheckpointPlan
    commit_auto: bool
    mean_length: float
    evaluation_rows: tuple[int, ...]
    sample_tokens: int
    disk_free_bytes: int
    total_steps: int
    vocabulary_parts: int | None = None
    device: DeviceSpeed | None = None
    device_bytes: int = 0
    smaller: Callable[[], Smaller | None] = field(default=_nothing, compare=False)
