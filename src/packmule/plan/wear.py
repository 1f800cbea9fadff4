"""Wear: what a run writes to its disk, against what the disk is rated to endure."""

from __future__ import annotations

from dataclasses import dataclass

from packmule.errors import ConfigError
from packmule.plan.bounds import Sizes
from packmule.plan.situation import Situation
from packmule.shapes.module import ModuleShape
from packmule.spec.plan import Plan
from packmule.spec.units import format_bytes, format_share

USUAL_REWRITES = 600
"""Times that a consumer TLC drive may be written whole: its rated TBW over its capacity, as the data
sheets of Samsung 970 EVO Plus, Samsung 980 PRO and WD Black SN770 have it (600 TBW for 1 TB)."""

MOST_SHARE = 0.1
"""A run that takes more of a disk's rated life wants to be confirmed."""

_IN_RAM = ("tmpfs", "ramfs")


@dataclass(frozen=True)
class Wear:
    """What is written to the disk of the state.

    Attributes:
        run_bytes: in the steps that are left, their commits and snapshots.
        doubled_bytes: the same for the same rows in steps of twice as many: state, weights and gradients
            are written once a step, spilled inputs once a row.
        endurance_bytes: written over the disk's rated life; 0: not known, or it is RAM.
        assumed: the rating is `USUAL_REWRITES` of the file system's size.
        per_terabyte: tokens (samples, for modules) trained per TB written; None: nothing is written.
    """

    run_bytes: int
    doubled_bytes: int
    endurance_bytes: int
    assumed: bool
    per_terabyte: float | None

    @property
    def share(self) -> float:
        """Of the rated life; 0 where that is not known."""
        return self.run_bytes / self.endurance_bytes if self.endurance_bytes else 0.0

    @property
    def rating(self) -> str:
        """Like "600 TB"; says so where it is assumed."""
        known = format_bytes(self.endurance_bytes)
        return f"{known} (assumed: {USUAL_REWRITES} times its size; --tbw sets it)" if self.assumed else known


def wear(situation: Situation, plan: Plan, steps: int) -> Wear:
    """What `steps` steps of a predicted plan write.

    Raises:
        ValueError: the plan has no prediction.
    """
    predicted, numerics = plan.predicted, plan.numerics
    if predicted is None:
        raise ValueError("a plan without a prediction")
    spilled = predicted.disk_bytes_spilled_per_step
    fixed = predicted.disk_bytes_written_per_step - spilled
    snapshots = 0
    if plan.checkpoint.snapshot_steps:
        state = sum(Sizes.of(situation.shape, numerics).state)
        snapshots = steps // plan.checkpoint.snapshot_steps * state
    disk, rated = situation.hardware.disks[0], situation.wishes.tbw
    endurance = disk.total_bytes * USUAL_REWRITES if rated == "auto" else rated
    if disk.filesystem in _IN_RAM:
        endurance = 0
    length = 1 if isinstance(situation.shape, ModuleShape) else numerics.max_seq_length
    written = steps * (fixed + spilled) + snapshots
    return Wear(
        run_bytes=written,
        doubled_bytes=-(-steps * fixed // 2) + steps * spilled + snapshots,
        endurance_bytes=endurance,
        assumed=rated == "auto",
        per_terabyte=steps * numerics.rows * length / written * 1e12 if written else None,
    )


def refuse_wear(situation: Situation, plan: Plan, steps: int) -> None:
    """Refuse a run that takes more than `MOST_SHARE` of its disk's rated life.

    Raises:
        ConfigError: it does; names what would write less.
    """
    found = wear(situation, plan, steps)
    if found.share <= MOST_SHARE:
        return
    ways = ["--yes runs it all the same"]
    if found.doubled_bytes < found.run_bytes:
        ways.append(
            f"the same rows in steps of twice as many (--global-batch-size {2 * plan.numerics.rows}, "
            f"half the steps) write {format_bytes(found.doubled_bytes)}"
        )
    if plan.placement.state == "disk":
        ways.append("more --ram may keep the state in memory")
    ways.append("--disk names another disk")
    raise ConfigError(
        f"The run would write {format_bytes(found.run_bytes)} to the disk of "
        f"{situation.hardware.disks[0].path}, {format_share(found.share)} of the {found.rating} that it is "
        "rated for.",
        "; ".join(ways),
    )
