"""Looks: what a run does between steps: evaluate, sample, keep copies. Each once, as the log says."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from packmule.checkpoint.snapshots import best_step, is_complete, keep_best, rotate, snapshot, snapshot_path
from packmule.checkpoint.store import StateStore
from packmule.data.token_bytes import read_token_bytes
from packmule.data.tokenizer import TextTokenizer
from packmule.engine.engine import Engine
from packmule.errors import RunFailed
from packmule.spec.job import Job
from packmule.tiers.disk import aligned_buffer
from packmule.train.folder import Log, RunFolder
from packmule.train.memory import memory_now
from packmule.train.messages import Request, Sender
from packmule.train.stopping import metric_key, standing

Report = Callable[[int, int], None]


class EvaluationSet(NamedTuple):
    """What is judged on.

    Attributes:
        batch: makes a micro-batch of `count` rows from row `first` on.
    """

    name: str
    batch: Callable[[int, int], Any]


@dataclass(frozen=True)
class Reading:
    """What samples and metrics are read with; loaded before memory is handed out.

    Attributes:
        sets: to evaluate on, in the order of `Request.evaluation_rows`.
        tokenizer: of samples, or None where there are none.
        token_bytes: as `token_bytes_of`.
    """

    sets: tuple[EvaluationSet, ...]
    tokenizer: TextTokenizer | None
    token_bytes: Tensor | None


class Looks:
    """What is done at a step with no update pending; copies are kept of its commit.

    Args:
        request: what the parent asks for.
        job: of the run.
        reading: what samples and metrics are read with.
        engine: with no update pending.
        log: where results go; what it has is not done again.
        sender: where events go.
        signals: asked between tasks.
        reporter: makes a progress reporter of a phase's name.
    """

    def __init__(
        self,
        request: Request,
        job: Job,
        reading: Reading,
        engine: Engine,
        log: Log,
        sender: Sender,
        signals: Any,
        reporter: Callable[[str], Report],
    ) -> None:
        self._request, self._job, self._reading = request, job, reading
        self._engine, self._log, self._sender, self._signals = engine, log, sender, signals
        self._reporter = reporter
        self._sets = tuple(zip(reading.sets, request.evaluation_rows, strict=True))

    @property
    def store(self) -> StateStore:
        """The run's state."""
        return self._engine.runtime.writable

    def evaluate(self, step: int) -> None:
        """Judge on every evaluation set that the log does not have.

        Raises:
            RunFailed: a loss is not finite.
            Stopped: a signal came.
        """
        for part, rows in self._sets:
            if rows and not self._log.has(step, metric_key(part.name, "loss")):
                self._evaluate(step, part, rows)

    def _evaluate(self, step: int, part: EvaluationSet, rows: int) -> None:
        self._sender.send("phase", name="evaluation")
        began = time.monotonic()
        batches = evaluation_batches(self._engine, part, rows, self._reporter("evaluation"))
        tally = self._engine.evaluate(batches, self._signals, self._reading.token_bytes)
        metrics = tally.metrics()
        if not math.isfinite(metrics["loss"]):
            raise not_finite(f"The held-out loss at step {step}")
        named = {metric_key(part.name, name): value for name, value in metrics.items()}
        self._log.write({"step": step, **named, metric_key(part.name, "targets"): tally.targets})
        seconds = time.monotonic() - began
        self._sender.send("evaluation", step=step, set=part.name, **metrics, seconds=seconds, **memory_now())

    def sample(self, step: int) -> None:
        """Continue the prompt, unless the log has it.

        Raises:
            RunFailed: the model's output is not finite.
        """
        tokenizer = self._reading.tokenizer
        if tokenizer is None or self._log.has(step, "sample"):
            return
        self._sender.send("phase", name="sample")
        stop = frozenset((tokenizer.eos,))
        try:
            ids = list(self._engine.generate(self._request.sample_ids, stop, stopping=self._signals))
        except ValueError:
            raise not_finite(f"The output of the model at step {step}") from None
        text = tokenizer.decode(ids)
        self._log.write({"step": step, "sample": text})
        self._sender.send("sample", step=step, text=text, **memory_now())

    def has_snapshot(self, step: int) -> bool:
        """Whether a full copy of a step is there."""
        store = self.store
        return is_complete(store.disk, snapshot_path(store.folder, step), store.checksum)

    def snapshot(self, step: int, kept: int) -> None:
        """Keep a full copy of the last commit, which is this step's, and the newest `kept`."""
        store = self.store
        self._sender.send("phase", name="snapshot")
        path = snapshot(store, aligned_buffer(store.layout.chunk_bytes), self._reporter("snapshot"))
        rotate(store.disk, store.folder, kept, store.checksum)
        self._sender.send("snapshot", step=step, path=str(path))

    def is_best(self, step: int) -> bool:
        """Whether a full copy of this step is to be kept: no step so far was better, and it is not there."""
        store, entries = self.store, self._log.entries
        if not self._job.checkpoint.save_best or standing(entries, self._job.train).best_step != step:
            return False
        return best_step(store.disk, store.folder, store.checksum) != step

    def keep_best(self, step: int) -> None:
        """Keep a full copy of the last commit, which is this step's, as the best."""
        store = self.store
        self._sender.send("phase", name="snapshot")
        path = keep_best(store, aligned_buffer(store.layout.chunk_bytes), self._reporter("snapshot"))
        self._sender.send("snapshot", step=step, path=str(path))


def token_bytes_of(folder: RunFolder) -> Tensor | None:
    """int32 [V] for Engine.evaluate, or None where the run's tokenizer does not say."""
    found = read_token_bytes(folder.model, folder.decoder_shape().vocab)
    return None if found is None else torch.from_numpy(found)


def evaluation_batches(engine: Engine, part: EvaluationSet, rows: int, report: Report) -> Iterator[list[Any]]:
    """The first `rows` rows of a set as Engine.evaluate takes them.

    Args:
        report: called with (rows done, rows) before each group.
    """
    done = 0
    for group in engine.evaluation_groups(rows):
        found = []
        for count in group:
            found.append(part.batch(done, count))
            done += count
        report(done, rows)
        yield found


def not_finite(what: str) -> RunFailed:
    """The error for numbers that have left the finite."""
    return RunFailed(
        f"{what} is not finite (NaN or infinity): the training has diverged, or the weights it began with "
        "are broken.",
        "start again in another --output-dir with a lower learning rate, or from whole weights",
    )
