"""A loss that is not finite ends the run; the last good commit stays as it was."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from recording_disk import RecordingDisk
from tests.exactness.runs import (
    Case,
    Data,
    make_case,
    make_plan,
    open_store,
    progress,
    run_steps,
    step_engine,
    tiny_shape,
)

from packmule.errors import RunFailed
from packmule.kernels import load
from packmule.kernels.contract import Kernels
from packmule.shapes.bodies import DTYPES
from packmule.spec.plan import Placement
from packmule.tiers.disk import aligned_buffer

RUN = Path("/run")
RARE = 96
"""A token that no document has before it is let in."""

PLANS = {
    "after-backward": {},
    "after-backward, disk": {"placement": Placement(state="disk", weights="disk", gradients="disk")},
    "on-backward": {"update": "on-backward", "clip": None},
    "on-backward, disk": {
        "update": "on-backward",
        "clip": None,
        "placement": Placement(state="disk", weights="state"),
    },
    "two passes": {"update": "on-backward"},
    "on-fetch": {"update": "on-fetch"},
    "on-fetch, disk": {
        "update": "on-fetch",
        "placement": Placement(state="disk", weights="state", gradients="disk", inputs="disk"),
    },
}


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


class RareData(Data):
    """Data without the rare token until a step."""

    def __init__(self, seed: int, vocab: int, poisoned_step: int) -> None:
        super().__init__(seed, vocab)
        self.poisoned_step = poisoned_step

    def rows(self, step: int, count: int, length: int) -> list[list[list[int]]]:
        rows = super().rows(step, count, length)
        for row in rows:
            for document in row:
                for index, token in enumerate(document):
                    if token == RARE:
                        document[index] = 0
        if step == self.poisoned_step:
            rows[0][0][0] = RARE
        return rows


def poison_embedding(case: Case, kernels: Kernels, disk: RecordingDisk, step: int, value: float) -> None:
    """Put a number into the rare token's master weights, as a commit of its own."""
    store = open_store(RUN, case.shape, case.plan, kernels, disk)
    head = store.load()
    assert head is not None and head.step == step
    dtype = {"float32": np.float32, "float64": np.float64}[DTYPES[case.plan.numerics.precision].master]
    row = case.shape.hidden * np.dtype(dtype).itemsize
    store.begin(0)
    buffer = aligned_buffer(store.layout.chunk_bytes)
    for index, chunk in enumerate(store.layout.chunks(0)):
        store.read(0, index, buffer)
        low, high = RARE * row - chunk.start, (RARE + 1) * row - chunk.start
        if chunk.plane == 0 and low < chunk.bytes and high > 0:
            part = np.frombuffer(buffer, np.uint8)[max(low, 0) : min(high, chunk.bytes)]
            part.view(dtype)[:] = value
        store.write(0, index, buffer)
    store.end(0)
    store.commit(progress(case.plan, step))
    store.close()


@pytest.mark.parametrize("commit_steps", (1, 3))
@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("value", (float("nan"), float("inf")))
def test_a_non_finite_loss_ends_the_run_at_the_last_good_commit(
    name: str, commit_steps: int, value: float, kernels: Kernels, seed: int
) -> None:
    plan = make_plan(commit_steps=commit_steps, micro_rows=(1, 1), steps=8, **PLANS[name])
    case = make_case(tiny_shape(tied=False), plan, 0, seed, kernels)
    disk = RecordingDisk()
    case.start(RUN, kernels, disk)
    engine, _ = case.open(RUN, kernels, disk)
    data = RareData(seed, case.shape.vocab, poisoned_step=7)
    run_steps(engine, data, 0, 3)
    engine.close()
    poison_embedding(case, kernels, disk, 3, value)

    engine, first = case.open(RUN, kernels, disk)
    assert first == 3
    for step in range(first, data.poisoned_step):
        step_engine(engine, data, step)
    before = case.state(RUN, kernels, disk)
    with pytest.raises(RunFailed, match="not finite"):
        step_engine(engine, data, data.poisoned_step)
    head, image = case.state(RUN, kernels, disk)
    # Every step before the poisoned one is good; the last of them may be committed on the way.
    assert head == (7 if commit_steps == 1 else 6)
    if not plan.commits_late:
        assert (head, image) == before
    # Updates of that step may be in RAM or in the other slots by now: nothing may commit them.
    with pytest.raises(RuntimeError, match="cut short"):
        engine.settle(progress(plan, 8))
    engine.close()
    assert case.state(RUN, kernels, disk) == (head, image)

    # With the cause gone, the run goes on from there.
    poison_embedding(case, kernels, disk, head, 0.125)
    engine, first = case.open(RUN, kernels, disk)
    trace = run_steps(engine, data, first, 8)
    engine.close()
    assert np.isfinite(trace).all() and case.state(RUN, kernels, disk)[0] == 8
