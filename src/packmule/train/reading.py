"""Evaluating and generating from a commit: a child's other two kinds of work."""

from __future__ import annotations

from typing import Any

from packmule.checkpoint.reader import StateReader
from packmule.data.tokenizer import TextTokenizer
from packmule.engine.engine import Engine, Needs
from packmule.engine.executor import Stopped
from packmule.errors import RunFailed
from packmule.graph.model import PlannedModel
from packmule.spec.plan import Plan
from packmule.tiers.disk import Disk
from packmule.train.folder import RunFolder
from packmule.train.look import evaluation_batches
from packmule.train.memory import keep_budget
from packmule.train.messages import Request, Sender
from packmule.train.setup import costs_of, make_kernels
from packmule.train.subject import Subject
from packmule.train.text_subject import open_subject


def _engine(
    request: Request, folder: RunFolder, disk: Disk, plan: Plan, signals: Any, subject: Subject | None = None
) -> Engine:
    """An engine over the commit in `folder.state`, loaded."""
    kernels = make_kernels(plan)
    reader = StateReader.open(disk, folder.state, kernels.crc32c)
    needs = Needs(request.mean_length, request.evaluation_rows, request.positions, training=False)
    costs = costs_of(folder.read_hardware(), plan)
    model = PlannedModel(folder.shape(), plan)
    modules = None if subject is None else subject.modules
    engine = Engine(model, kernels, reader, disk, folder.state, costs, needs, modules=modules)
    engine.arena.touch()
    keep_budget(request.ram_bytes, plan.numerics)
    engine.load(signals)
    return engine


def evaluate(request: Request, folder: RunFolder, disk: Disk, sender: Sender, signals: Any) -> None:
    """Sums over `evaluation_rows` rows of each set; sends one "evaluation" event per set."""
    plan = Plan.parse(request.plan, "the request")
    subject = open_subject(request, folder, plan)
    sets, known = subject.reading.sets, subject.reading.token_bytes
    engine = _engine(request, folder, disk, plan, signals, subject)

    def report(done: int, total: int) -> None:
        sender.send("progress", phase="evaluation", done=done, total=total)

    try:
        for part, rows in zip(sets, request.evaluation_rows, strict=True):
            if not rows:
                continue
            tally = engine.evaluate(evaluation_batches(engine, part, rows, report), signals, known)
            sender.send("evaluation", set=part.name, rows=rows, targets=tally.targets, **tally.metrics())
    except Stopped:
        raise signals.error() from None
    finally:
        engine.close()


def generate(request: Request, folder: RunFolder, disk: Disk, sender: Sender, signals: Any) -> None:
    """Continue the prompt; sends one "text" event."""
    tokenizer = TextTokenizer.from_folder(folder.model)
    engine = _engine(request, folder, disk, Plan.parse(request.plan, "the request"), signals)
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
