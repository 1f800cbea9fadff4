"""What the benchmarks of the engine share: a process set up like a training child, and an engine over a fresh
run with random weights. Nothing happens when it is run by itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from packmule.checkpoint.head import Progress
    from packmule.engine.engine import Engine
    from packmule.shapes.model import ModelShape
    from packmule.spec.batch import Batch
    from packmule.spec.hardware import Hardware
    from packmule.spec.plan import Plan
    from packmule.tiers.device import Device


def set_up_process() -> None:
    """As a training child does, before anything large is allocated."""
    from packmule.shapes.bodies import PRIMITIVES_KEPT
    from packmule.train.memory import tune_caches, tune_malloc

    tune_malloc()
    tune_caches(PRIMITIVES_KEPT)
    import torch

    torch.set_grad_enabled(False)


@contextmanager
def fresh_engine(
    folder: Path,
    config: dict[str, Any],
    shape: ModelShape,
    plan: Plan,
    hardware: Hardware,
    length: int,
    device: Device | None = None,
) -> Iterator[tuple[Engine, Progress]]:
    """An engine whose state is random weights, committed and loaded; and what its commits record.

    Args:
        folder: of the run, empty.
        config: of the model, as in config.json.
        length: tokens of a document.
        device: what computes, where the plan has one.
    """
    from packmule.checkpoint.head import Progress
    from packmule.data.manifest import random_manifest
    from packmule.engine.engine import Engine, Needs
    from packmule.graph.model import PlannedModel
    from packmule.models.weights.source import RandomSource
    from packmule.tiers.disk import PosixDisk
    from packmule.train.folder import RunFolder
    from packmule.train.memory import trim_malloc
    from packmule.train.setup import costs_of, make_kernels, make_store
    from packmule.train.transfer import import_weights

    kernels, disk, run = make_kernels(plan), PosixDisk(), RunFolder(folder, folder)
    store = make_store(disk, run, shape, plan, kernels)
    store.create_files()
    progress = Progress(step=0, cursor=0, tokens=0, numerics=plan.numerics, job_hash="", model=config)
    with RandomSource(random_manifest(config, 0)) as source:
        import_weights(store, shape, source, progress, lambda done, total: None)
    trim_malloc()
    engine = Engine(
        PlannedModel(shape, plan), kernels, store, disk, run.state, costs_of(hardware, plan),
        Needs(mean_length=float(length)), device=device,
    )  # fmt: skip
    engine.arena.touch()
    engine.load()
    try:
        yield engine, progress
    finally:
        engine.close()


def random_batches(plan: Plan, vocab: int, length: int) -> list[Batch]:
    """A step's micro-batches of random tokens: each row one document of `length`, which has as many targets
    less one."""
    import numpy as np

    from packmule.spec.batch import IGNORED, Batch

    rng, batches = np.random.default_rng(0), []
    for count in plan.numerics.micro_rows:
        ids = rng.integers(0, vocab, (count, length))
        after = np.full_like(ids, IGNORED)
        after[:, :-1] = ids[:, 1:]
        places = np.tile(np.arange(length, dtype=np.int32), count)
        batches.append(Batch(ids.reshape(-1), after.reshape(-1), places, (length,) * count))
    return batches
