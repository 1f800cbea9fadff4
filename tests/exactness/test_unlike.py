"""Plans of unlike numerics (splits into micro-batches, loss chunks) compute the same thing."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from tests.exactness.runs import Data, Image, count_targets, make_case, make_plan, run_steps, tiny_shape
from tests.fault.recording_disk import RecordingDisk
from tests.parity.plain import PlainModel, plain_step

from packmule.kernels.contract import Kernels
from packmule.models.context import TokenBatch
from packmule.spec.plan import Placement, Plan

STEPS = 20
LENGTH = 200

SPLITS = ((8,), (1,) * 8, (3, 5), (5, 1, 2))
LOSS_CHUNKS = (4096, 64, 7)

CLIP = 0.1
"""Below these runs' gradient norms, so that it bites."""

FLOAT64_LIMIT = 1e-10
FLOAT32_GRADIENT_LIMIT = 1e-6


def plan_of(precision: str, micro_rows: tuple[int, ...], loss_chunk: int, clip: float | None) -> Plan:
    """Placement and order differ too; they may not matter at all."""
    many = len(micro_rows) > 1
    return make_plan(
        precision=precision,
        micro_rows=micro_rows,
        loss_chunk=loss_chunk,
        clip=clip,
        placement=Placement(state="disk" if many else "ram", weights="state"),
        order="depth" if len(micro_rows) == 3 else "breadth",
        update="on-fetch" if many else "after-backward",
        commit_steps=STEPS,
        steps=STEPS,
        length=LENGTH,
        chunk_bytes=65536,
    )


def planes(image: Image, dtype: type) -> list[np.ndarray]:
    """Per plane: every parameter of the model, in one vector."""
    found: list[list[np.ndarray]] = [[], [], []]
    for data in image:
        for plane, part in zip(found, np.split(np.frombuffer(data, dtype), 3), strict=True):
            plane.append(part)
    return [np.concatenate(parts) for parts in found]


def relative(ours: np.ndarray, theirs: np.ndarray) -> float:
    ours, theirs = ours.astype(np.float64), theirs.astype(np.float64)
    return float(np.linalg.norm(ours - theirs) / np.linalg.norm(theirs))


def engine_image(plan: Plan, tied: bool, seed: int, kernels: Kernels, steps: int) -> Image:
    """The state after some steps of the engine."""
    case = make_case(tiny_shape(tied), plan, 0, seed, kernels)
    folder, disk = Path("/run"), RecordingDisk()
    case.start(folder, kernels, disk)
    engine, _ = case.open(folder, kernels, disk)
    run_steps(engine, case.data, 0, steps)
    engine.close()
    step, image = case.state(folder, kernels, disk)
    assert step == steps
    return image


def test_float64_runs_agree_after_20_steps(kernels: Kernels, seed: int) -> None:
    base: list[np.ndarray] = []
    for index, micro_rows in enumerate(SPLITS):
        plan = plan_of("fp64", micro_rows, LOSS_CHUNKS[index % len(LOSS_CHUNKS)], CLIP)
        ours = planes(engine_image(plan, seed % 2 == 0, seed, kernels, STEPS), np.float64)
        base = base or ours
        worst = max(relative(a, b) for a, b in zip(ours, base, strict=True))
        assert worst < FLOAT64_LIMIT, (micro_rows, worst)
        # Else they would not be unlike.
        assert index == 0 or worst > 0


def test_float32_gradients_agree(kernels: Kernels, seed: int) -> None:
    """The first moment after one step is (1 - beta1) times the gradient."""
    base: list[np.ndarray] = []
    for index, micro_rows in enumerate(SPLITS):
        plan = plan_of("fp32", micro_rows, LOSS_CHUNKS[index % len(LOSS_CHUNKS)], None)
        ours = planes(engine_image(plan, True, seed, kernels, 1), np.float32)[1:2]
        base = base or ours
        worst = relative(ours[0], base[0])
        assert worst < FLOAT32_GRADIENT_LIMIT, (micro_rows, worst)
        assert index == 0 or worst > 0


def test_float32_gradients_are_those_of_float64(kernels: Kernels, seed: int) -> None:
    for micro_rows in SPLITS:
        found = {}
        for precision in ("fp32", "fp64"):
            plan = plan_of(precision, micro_rows, 64, None)
            shape = tiny_shape(tied=True)
            batches = Data(seed, shape.vocab).batches(0, plan.numerics)
            assert count_targets(batches) > 0
            model = PlainModel(shape, precision, seed, kernels)
            capacity = max(plan.numerics.micro_tokens)
            _, grads = plain_step(model, [TokenBatch.from_batch(b) for b in batches], 64, capacity=capacity)
            found[precision] = torch.cat(
                [g.double().flatten() for named in grads for g in named.values()]
            ).numpy()
        # Each is that far from exact; two splits share some of it.
        assert relative(found["fp32"], found["fp64"]) < 2 * FLOAT32_GRADIENT_LIMIT
