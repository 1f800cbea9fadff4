"""Evaluating and generating from a commit: a child's other two kinds of work."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from packmule.checkpoint.reader import StateReader
from packmule.data.batches import Batches
from packmule.data.prepared import open_data
from packmule.data.tokenizer import TextTokenizer
from packmule.engine.engine import Engine, Needs
from packmule.engine.executor import Stopped
from packmule.errors import ConfigError, RunFailed
from packmule.graph.model import PlannedModel
from packmule.spec.batch import Batch
from packmule.spec.plan import Plan
from packmule.tiers.disk import PosixDisk
from packmule.train.folder import RunFolder
from packmule.train.memory import limit_data, untouched_bytes
from packmule.train.messages import Request, Sender
from packmule.train.setup import costs_of, make_kernels


def _engine(request: Request, folder: RunFolder, signals: Any) -> Engine:
    """An engine over the commit in `folder.state`, loaded."""
    plan = Plan.parse(request.plan, "the request")
    kernels, disk = make_kernels(plan), PosixDisk()
    reader = StateReader.open(disk, folder.state, kernels.crc32c)
    needs = Needs(request.mean_length, request.evaluation_rows, request.positions, training=False)
    costs = costs_of(folder.read_hardware(), plan)
    model = PlannedModel(folder.shape(), plan)
    engine = Engine(model, kernels, reader, disk, folder.state, costs, needs)
    engine.arena.touch()
    limit_data(request.ram_bytes, untouched_bytes(plan.numerics.threads))
    engine.load(signals)
    return engine


def evaluate(request: Request, folder: RunFolder, sender: Sender, signals: Any) -> None:
    """Loss over `evaluation_rows` validation rows; sends one "evaluation" event."""
    data = open_data(Path(request.data))
    if not data.validation:
        raise ConfigError("The run has no validation data.", "give text with --dataset, or set data.val_size")
    batches = Batches(data.validation[0].store, data.validation[0].rows, 0)
    engine = _engine(request, folder, signals)

    def groups() -> Iterator[list[Batch]]:
        done = 0
        for group in engine.evaluation_groups:
            found = []
            for count in group:
                found.append(batches.micro_batch(tuple(range(done, done + count))))
                done += count
            sender.send("progress", phase="evaluation", done=done, total=request.evaluation_rows)
            yield found

    try:
        total, count = engine.evaluate(groups(), signals)
    except Stopped:
        raise signals.error() from None
    finally:
        engine.close()
    loss = total / max(1, count)
    sender.send("evaluation", loss=loss, perplexity=math.exp(min(loss, 700.0)), targets=count)


def generate(request: Request, folder: RunFolder, sender: Sender, signals: Any) -> None:
    """Continue the prompt; sends one "text" event."""
    tokenizer = TextTokenizer.from_folder(folder.model)
    engine = _engine(request, folder, signals)
    ids: list[int] = []
    try:
        for token in engine.generate(
            request.sample_ids,
            frozenset((tokenizer.eos,)),
            request.temperature,
            request.top_p,
            request.seed,
            signals,
        ):
            ids.append(token)
            done, total = len(ids), request.positions - len(request.sample_ids)
            sender.send("progress", phase="generate", done=done, total=total)
    except Stopped:
        raise signals.error() from None
    except ValueError:
        raise RunFailed(
            f"The output of the model in {folder.state} is not finite (NaN or infinity).",
            "its training has diverged: use an earlier checkpoint-N",
        ) from None
    finally:
        engine.close()
    sender.send("text", text=tokenizer.decode(ids), tokens=len(ids))
