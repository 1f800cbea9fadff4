"""A power loss at any moment of a training run leaves one of its commits, from which the run goes
on to the same bits, through more power losses; and its snapshots, which are whole or not there."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from recording_disk import Folder, RecordingDisk
from tests.exactness.runs import HIFT, Case, keeps, make_case, make_plan, run_steps, tiny_shape

from packmule.kernels import load
from packmule.kernels.contract import Kernels
from packmule.spec.plan import Placement, Plan

STEPS = 4
STATES = 60
LONG_STATES = 2_000
"""States per plan that are recovered and finished."""

POOLED = 200
"""States that wait to be finished: more are found than ever are, and each holds two copies of a run."""

RUN = Path("/run")

PLANS = {
    "ram, commit every 2": {"commit_steps": 2, "snapshot_steps": 2, "snapshots_kept": 1, "precision": "fp32"},
    "disk, on-fetch": {
        "placement": Placement(state="disk", weights="disk", gradients="disk", inputs="disk"),
        "update": "on-fetch",
        "snapshot_steps": 1,
        "snapshots_kept": 1,
    },
    "disk, on-backward, commit every 3": {
        "placement": Placement(state="disk", weights="state"),
        "update": "on-backward",
        "clip": None,
        "commit_steps": 3,
        "snapshot_steps": 2,
    },
    "vocabulary in parts, some kept": {
        "placement": Placement(state="disk", weights="state", gradients="disk", kept_weights=2, kept_state=1),
        "update": "on-fetch",
        "snapshot_steps": 2,
        "snapshots_kept": 1,
        "commit_steps": 2,
        "vocabulary_parts": 2,
    },
    "hift, lomo, two passes": {
        "placement": Placement(state="disk", weights="state", inputs="disk"),
        "update": "on-backward",
        "optimizer": {"rule": "lomo"},
        "snapshot_steps": 2,
        "turns": HIFT,
        "commit_steps": 2,
    },
}


@dataclass
class Promise:
    """Commits that a power loss now may leave: `low` or, while it is being made, `high`; and the snapshots
    that it must leave: `kept`, with `renamed` when their folder is synced."""

    low: int
    high: int
    kept: set[int] = field(default_factory=set)
    renamed: set[int] = field(default_factory=set)


class Search:
    """Runs from states that power losses left, cutting the power again on the way."""

    def __init__(self, case: Case, kernels: Kernels, seed: int) -> None:
        self.case, self.kernels, self.rng = case, kernels, random.Random(seed)
        self.pool: list[tuple[Folder, int, str]] = []
        self.finished = 0
        self.recovered: set[int] = set()
        self.kept: set[int] = set()

    def start(self) -> None:
        disk = RecordingDisk()
        self.case.start(RUN, self.kernels, disk)
        self.pool.append((disk.root, 0, "the start"))

    def run(self, states: int) -> None:
        """Finish this many states, each of them checked when it was found."""
        while self.finished < states:
            # The newest as often as any: chains of power losses grow long.
            index = len(self.pool) - 1 if self.rng.random() < 0.5 else self.rng.randrange(len(self.pool))
            root, step, where = self.pool[index] if len(self.pool) == 1 else self.pool.pop(index)
            self.finish(root, step, where)
            self.finished += 1

    def finish(self, root: Folder, step: int, where: str) -> None:
        """Carry a run on to its end and hold it against the plain loop."""
        case = self.case
        commits = [s for s in committed(case.plan) if s > step]
        promise = Promise(step, step)

        def after(disk: RecordingDisk) -> None:
            operation = disk.log[-1]
            kept = re.search(r"checkpoint-(\d+)", operation)
            if operation.startswith("rename") and kept:
                promise.renamed.add(int(kept[1]))
            elif operation.startswith("rename"):
                promise.high = commits.pop(0)
            elif operation.startswith("remove") and kept:
                promise.kept.discard(int(kept[1]))
            elif operation == f"sync_folder {RUN}":
                promise.low = promise.high
                promise.kept |= promise.renamed
                promise.renamed.clear()
            likely = 0.01 if operation.startswith("write /") else 0.3
            if self.rng.random() < likely:
                self.cut(disk, promise, operation)

        # A state may be finished more than once.
        disk = RecordingDisk(copy_of(root), after=after)
        engine, first = case.open(RUN, self.kernels, disk)
        assert first == step, where
        trace = run_steps(engine, case.data, step, STEPS)
        engine.close()
        assert trace == case.expected.trace[step:], where
        assert case.state(RUN, self.kernels, disk) == (STEPS, case.expected.images[-1]), where
        assert not commits, where
        assert set(case.snapshots(RUN, self.kernels, disk)) >= promise.kept, where

    def cut(self, disk: RecordingDisk, promise: Promise, operation: str) -> None:
        """One state that a power loss now may leave."""
        left = disk.after_power_loss(self.rng)
        where = f"after {operation}, {promise}"
        step, image = self.case.state(RUN, self.kernels, RecordingDisk(copy_of(left.root)))
        assert step in (promise.low, promise.high), where
        assert image == self.case.expected.images[step], where
        found = self.case.snapshots(RUN, self.kernels, RecordingDisk(copy_of(left.root)))
        assert promise.kept <= set(found) and all(kept <= step for kept in found), (found, where)
        self.kept.update(found)
        self.recovered.add(step)
        if len(self.pool) == POOLED:
            self.pool.pop(self.rng.randrange(POOLED))
        self.pool.append((left.root, step, where))


def committed(plan: Plan) -> list[int]:
    """Steps with a commit."""
    every = plan.checkpoint.commit_steps
    return [step for step in range(1, STEPS + 1) if step % every == 0 or keeps(plan, step) or step == STEPS]


def copy_of(folder: Folder) -> Folder:
    """The same tree after a power loss that loses nothing."""
    return folder.after_power_loss(random.Random(0), 1.0)


@pytest.fixture
def kernels() -> Iterator[Kernels]:
    """As in the training child, with one thread, since at these sizes more only wait."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    family = load(1)
    with torch.no_grad():
        yield family
    family.close()
    torch.set_num_threads(threads)


@pytest.mark.parametrize("name", PLANS)
def test_every_state_a_power_loss_leaves_goes_on_to_the_same_bits(
    name: str, kernels: Kernels, seed: int, long: bool
) -> None:
    plan = make_plan(steps=STEPS, micro_rows=(1, 1), recompute=(True,), length=16, **PLANS[name])
    case = make_case(tiny_shape(tied=True, layers=1), plan, STEPS, seed, kernels)
    search = Search(case, kernels, seed)
    search.start()
    search.run(LONG_STATES if long else STATES)
    # Some tens of states need not meet every commit; thousands do.
    commits = {0, *committed(plan)}
    least = len(commits) if long else min(3, len(commits) - 1)
    assert len(search.recovered & commits) >= least
    assert search.kept
