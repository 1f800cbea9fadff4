"""Loop: the life of a training child: load, steps, evaluations, samples, snapshots, export."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from packmule.checkpoint.head import HEAD_NAME, Head, Progress
from packmule.checkpoint.reader import StateReader
from packmule.checkpoint.snapshots import restore, rotate, snapshot, snapshot_path, snapshots
from packmule.data.batches import Batches
from packmule.data.prepared import open_data
from packmule.data.tokenizer import TextTokenizer
from packmule.engine.engine import Engine, Needs
from packmule.engine.executor import Stopped
from packmule.errors import DamagedFile, DiskError, RunFailed
from packmule.graph.model import PlannedModel
from packmule.models.weights.export import ExportDtype, export_bytes, write_huggingface
from packmule.models.weights.source import WeightSource
from packmule.optim.adamw import Update
from packmule.optim.schedules import learning_rate
from packmule.spec.batch import Batch
from packmule.spec.job import job_hash
from packmule.tiers.disk import PosixDisk, aligned_buffer
from packmule.train.folder import Log, RunFolder
from packmule.train.journal import Journal, JournaledStore
from packmule.train.measured import Measured
from packmule.train.memory import process_memory
from packmule.train.messages import Request, Sender
from packmule.train.setup import costs_of, make_kernels, make_store
from packmule.train.transfer import exporter, import_weights

PROGRESS_SECONDS = 0.2
"""Least time between two progress events of one phase."""


class Loop:
    """One training child's work.

    Args:
        request: what the parent asks for.
        folder: the run.
        sender: where events go.
        signals: asked between tasks; its `check` raises Interrupted.
    """

    def __init__(self, request: Request, folder: RunFolder, sender: Sender, signals: Any) -> None:
        self.request = request
        self.folder = folder
        self.sender = sender
        self.signals = signals
        self.job = folder.job()
        self.plan = folder.read_plan()
        self.shape = folder.shape()
        self.disk = PosixDisk()
        self.kernels = make_kernels(self.plan)
        self.store = self._make_store()
        data = open_data(folder.data)
        self.rows = Batches(data.store, data.train, self.plan.numerics.seed)
        found = data.validation[0] if data.validation else None
        self.validation = None if found is None else Batches(found.store, found.rows, 0)
        self.tokenizer = TextTokenizer.from_folder(folder.model) if request.sample_ids else None
        self.tokens = 0
        self.step = 0
        self.measured = Measured()
        self._journal: Journal | None = None
        self._sent = 0.0

    def _make_store(self) -> JournaledStore:
        store = make_store(self.disk, self.folder, self.shape, self.plan, self.kernels)
        return JournaledStore(store, self._before_commit)

    @property
    def journal(self) -> Journal:
        """The run's log, from where the commit is on."""
        if self._journal is None:
            raise RuntimeError("the log is opened when the state is loaded")
        return self._journal

    @property
    def _commits_every_step(self) -> bool:
        """Whether leaving everything at once loses no more than the newest step."""
        return self.plan.placement.state == "disk" and self.plan.checkpoint.commit_steps == 1

    # Before step 1

    def prepare(self) -> None:
        """Import or find the state; make the engine."""
        head = self._head()
        needs = Needs(self.request.mean_length, self.request.evaluation_rows, self.request.positions)
        if head is None:
            self._import()
        costs = costs_of(self.folder.read_hardware(), self.plan)
        self.engine = Engine(
            PlannedModel(self.shape, self.plan),
            self.kernels,
            self.store,
            self.disk,
            self.folder.state,
            costs,
            needs,
        )

    def _head(self) -> Head | None:
        try:
            head = self.store.load()
        except DamagedFile as damage:
            head = self._restore(damage)
        if head is None and snapshots(self.disk, self.folder.state, self.kernels.crc32c):
            missing = DamagedFile(f"{self.folder.state / HEAD_NAME} is missing.", "restore it")
            head = self._restore(missing)
        if head is not None:
            self.step, self.tokens = head.step, head.tokens
        return head

    def _restore(self, damage: DamagedFile) -> Head:
        """Go back to the newest snapshot that is whole; the error if there is none."""
        found = snapshots(self.disk, self.folder.state, self.kernels.crc32c)
        for path in reversed(found):
            self.sender.send("note", text=f"{damage.cause} Going back to {path.name}.")
            self.store.close()
            self.store = self._make_store()
            try:
                with StateReader.open(self.disk, path, self.kernels.crc32c) as reader:
                    buffer = aligned_buffer(reader.layout.chunk_bytes)
                head = restore(self.store, path, buffer, self._report("restore"))
            except DamagedFile as another:
                damage = another
                continue
            self.step, self.tokens = head.step, head.tokens
            return head
        raise damage

    def _import(self) -> None:
        self.sender.send("phase", name="load")
        report = self._report("load")
        self.store.create_files()
        with WeightSource.open(self.folder.model) as source:
            import_weights(self.store, self.shape, source, self._progress(0), report)

    def _report(self, phase: str) -> Callable[[int, int], None]:
        """Tell the parent how far a phase is, now and then; stop if a signal came."""

        def report(done: int, total: int) -> None:
            self.signals.check()
            now = time.monotonic()
            if now - self._sent > PROGRESS_SECONDS or done == total:
                self._sent = now
                self.sender.send("progress", phase=phase, done=done, total=total, **self._memory())

        return report

    def _memory(self) -> dict[str, int]:
        memory = process_memory()
        return {"resident_bytes": memory.resident, "peak_bytes": memory.peak}

    def _progress(self, step: int) -> Progress:
        return Progress(
            step=step,
            cursor=step * self.plan.numerics.rows,
            tokens=self.tokens,
            numerics=self.plan.numerics,
            job_hash=job_hash(self.job),
            model=self.folder.model_config(),
        )

    # The run

    def run(self) -> None:
        """From the last commit to the end, or until a signal."""
        try:
            self._run()
        except Stopped:
            raise self.signals.error() from None
        finally:
            self.engine.close()

    def _run(self) -> None:
        self.sender.send("phase", name="resume" if self.step else "load")
        try:
            self.engine.load(self.signals)
        except DamagedFile as damage:
            self._restore(damage)
            self.engine.runtime.store = self.store
            self.engine.load(self.signals)
        self._open_log()
        total = self.request.total_steps
        self.sender.send("start", step=self.step, total=total, **self._memory())
        self._look_and_save(total)  # what a stop after the last commit left out
        while self.step < total:
            self._train_step(total)
            self._look_and_save(total)
        self._settle()
        self._look()
        self._export()
        self.sender.send("done", step=self.step, measured=self.measured.summary(), **self._memory())

    def _open_log(self) -> None:
        log, every = Log(self.folder.log, self.step), self.job.logging.logging_steps
        self._journal = Journal(log, every)
        for text in log.notes(every):
            self.sender.send("note", text=text)

    def _look_and_save(self, total: int) -> None:
        """Whatever is due at this step besides training, unless it is there already."""
        step, every = self.step, self.job.train.eval_steps
        if step < total and (step == 0 or (every and step % every == 0)):
            self._look()
        save = self.plan.checkpoint.snapshot_steps
        if save and step and step % save == 0:
            self._snapshot()

    def _settle(self) -> None:
        """Commit all steps. A signal cuts this short only where that loses no more than a step."""
        stopping = self.signals if self._commits_every_step else None
        self.engine.settle(self._progress(self.step), stopping)
        self.signals.check()

    def _train_step(self, total: int) -> None:
        numerics, step, began = self.plan.numerics, self.step, time.monotonic()
        self.sender.send("phase", name="step")
        ids = self.rows.row_ids(step, numerics.rows)
        batches, start = [], 0
        for count in numerics.micro_rows:
            batches.append(self.rows.micro_batch(ids[start : start + count]))
            start += count
        targets = self.rows.targets(ids)
        rate = learning_rate(numerics.schedule, step)
        self.tokens += targets
        commit = (step + 1) % self.plan.checkpoint.commit_steps == 0 or step + 1 == total
        self.journal.begin(step + 1, rate, self.tokens, ids, began)
        try:
            result = self.engine.step(
                batches,
                targets,
                Update(step + 1, rate),
                self._progress(step + 1),
                commit,
                stopping=self._stop_now,
            )
        except Stopped:
            self.journal.drop()
            self.tokens -= targets
            # Nothing of this step has touched the state: what came before it can be kept.
            if self.engine.clean:
                self.engine.settle(self._progress(step))
            raise
        self.step = step + 1
        seconds = time.monotonic() - began
        self.measured.add(result, seconds)
        self.journal.end(result.loss, result.grad_norm)
        self.sender.send(
            "step",
            step=self.step,
            loss=result.loss,
            learning_rate=rate,
            grad_norm=result.grad_norm,
            seconds=seconds,
            tokens=sum(batch.tokens for batch in batches),
            **self._memory(),
        )
        if self.signals():
            self.engine.settle(self._progress(self.step))
            raise self.signals.error()

    def _stop_now(self) -> bool:
        """A step is left at once where that loses no more than this step; else it is finished."""
        if not self.signals():
            return False
        return self._commits_every_step or self.engine.clean

    def _before_commit(self, progress: Progress) -> None:
        if self._journal is not None:
            self._journal.before_commit(progress.step, self._result)

    def _result(self) -> tuple[float, float]:
        """Loss and gradient norm of the step under way, as Engine.step gives them, to the bit."""
        state, total = self.engine.runtime.state, 0.0
        for micro in sorted(state.losses):
            total += state.losses[micro][0]
        return total * state.scale, math.sqrt(state.square)

    def _look(self) -> None:
        """Evaluate and sample, with nothing pending, unless the log has it."""
        self._settle()
        evaluates = self.validation is not None and self.request.evaluation_rows
        if evaluates and not self.journal.log.has(self.step, "eval/loss"):
            self.sender.send("phase", name="evaluation")
            began = time.monotonic()
            total, count = self.engine.evaluate(self._validation_batches(), self.signals)
            loss = total / max(1, count)
            if not math.isfinite(loss):
                raise _not_finite(f"The held-out loss at step {self.step}")
            entry = {"step": self.step, "eval/loss": loss, "eval/perplexity": _perplexity(loss)}
            self.journal.log.write({**entry, "eval/targets": count})
            self.sender.send(
                "evaluation",
                step=self.step,
                loss=loss,
                perplexity=_perplexity(loss),
                seconds=time.monotonic() - began,
                **self._memory(),
            )
        if self.tokenizer is not None and not self.journal.log.has(self.step, "sample"):
            self.sender.send("phase", name="sample")
            stop = frozenset((self.tokenizer.eos,))
            try:
                ids = list(self.engine.generate(self.request.sample_ids, stop, stopping=self.signals))
            except ValueError:
                raise _not_finite(f"The output of the model at step {self.step}") from None
            text = self.tokenizer.decode(ids)
            self.journal.log.write({"step": self.step, "sample": text})
            self.sender.send("sample", step=self.step, text=text, **self._memory())

    def _validation_batches(self) -> Iterator[list[Batch]]:
        assert self.validation is not None
        done, total = 0, self.request.evaluation_rows
        report = self._report("evaluation")
        for group in self.engine.evaluation_groups:
            batches = []
            for rows in group:
                batches.append(self.validation.micro_batch(tuple(range(done, done + rows))))
                done += rows
            report(done, total)
            yield batches

    def _snapshot(self) -> None:
        checksum = self.kernels.crc32c
        if snapshot_path(self.folder.state, self.step) in snapshots(self.disk, self.folder.state, checksum):
            return
        self.sender.send("phase", name="snapshot")
        self._settle()
        path = snapshot(self.store, aligned_buffer(self.store.layout.chunk_bytes), self._report("snapshot"))
        rotate(self.disk, self.folder.state, self.plan.checkpoint.snapshots_kept, checksum)
        self.sender.send("snapshot", step=self.step, path=str(path))

    def _export(self) -> None:
        self.sender.send("phase", name="export")
        dtype: ExportDtype = "float32" if self.plan.numerics.precision != "bf16-mixed" else "bfloat16"
        self._check_room(self.folder.final, export_bytes(self.shape, dtype))
        with self.store.reader() as reader:
            write_huggingface(
                self.folder.final,
                self.shape,
                self.folder.model_config(),
                exporter(reader, self.signals.check),
                dtype,
                self.folder.model,
            )
        self.sender.send("export", path=str(self.folder.final), **self._memory())

    def _check_room(self, path: Path, needed: int) -> None:
        """Say what is missing before anything is written."""
        free = self.disk.free_bytes(path.parent)
        if needed > free:
            raise DiskError(
                f"{path}: the disk is full: {needed:,} bytes to write, {free:,} bytes free.",
                f"free at least {needed - free:,} bytes there, then run the same command",
            )


def _not_finite(what: str) -> RunFailed:
    return RunFailed(
        f"{what} is not finite (NaN or infinity): the training has diverged, or the weights it began with "
        "are broken.",
        "start again in another --output-dir with a lower learning rate, or from whole weights",
    )


def _perplexity(loss: float) -> float:
    return math.exp(min(loss, 700.0))
