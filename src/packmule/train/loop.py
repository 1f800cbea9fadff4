"""Loop: the life of a training child: load, steps, export, with looks between the steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from packmule.checkpoint.head import HEAD_NAME, Head, Progress
from packmule.checkpoint.reader import StateReader
from packmule.checkpoint.snapshots import restore, snapshots
from packmule.engine.engine import Engine, Needs
from packmule.engine.executor import Stopped
from packmule.errors import DamagedFile, DiskError, OutOfMemory, PackmuleError, TimeIsUp
from packmule.graph.model import PlannedModel
from packmule.optim.schedules import update_at
from packmule.spec.growth import rows_at, rows_before
from packmule.spec.resume import job_hash
from packmule.tiers.disk import Disk, aligned_buffer
from packmule.train.folder import Log, RunFolder
from packmule.train.journal import Journal, JournaledStore
from packmule.train.look import Looks
from packmule.train.measured import Measured
from packmule.train.memory import is_out_of_memory, keep_budget, memory_now, out_of_memory, unlimit_data
from packmule.train.messages import Request, Sender
from packmule.train.setup import costs_of, make_device, make_kernels, make_store
from packmule.train.stopping import stops
from packmule.train.text_subject import open_subject
from packmule.train.transfer import exporter, import_weights

PROGRESS_SECONDS = 0.2
"""Least time between two progress events of one phase."""


class Loop:
    """One training child's work.

    Args:
        request: what the parent asks for.
        folder: the run.
        disk: where it lies.
        sender: where events go.
        signals: asked between tasks; its `check` raises Interrupted.
    """

    def __init__(self, request: Request, folder: RunFolder, disk: Disk, sender: Sender, signals: Any) -> None:
        self.request = request
        self.folder = folder
        self.sender = sender
        self.signals = signals
        self.job = folder.job()
        self.plan = folder.read_plan()
        self.disk = disk
        self.kernels = make_kernels(self.plan)
        self.subject = open_subject(request, folder, self.plan)
        self.store = self._make_store()
        self.tokens = 0
        self.step = 0
        self.measured = Measured()
        self._began = time.monotonic()
        self._longest = 0.0
        self._journal: Journal | None = None
        self._looks: Looks | None = None
        self._sent = 0.0

    def _make_store(self) -> JournaledStore:
        store = make_store(self.disk, self.folder, self.subject.shape, self.plan, self.kernels)
        return JournaledStore(store, self._before_commit)

    @property
    def journal(self) -> Journal:
        """The run's log, from where the commit is on."""
        if self._journal is None:
            raise RuntimeError("the log is opened when the state is loaded")
        return self._journal

    @property
    def looks(self) -> Looks:
        """What is done between steps."""
        if self._looks is None:
            raise RuntimeError("nothing is looked at before the state is loaded")
        return self._looks

    @property
    def _commits_every_step(self) -> bool:
        """Whether leaving everything at once loses no more than the newest step."""
        return self.plan.placement.state == "disk" and self.plan.checkpoint.commit_steps == 1

    # Before step 1

    def prepare(self) -> None:
        """Import or find the state; make the engine."""
        head = self._head()
        needs = Needs(self.request.mean_length, self.request.evaluation_rows, self.request.positions)
        if head is None and self.request.begin_with:
            self.sender.send("phase", name="load")
            self._take_up(self._copy(Path(self.request.begin_with), "load"))
        elif head is None:
            self._import()
        hardware = self.folder.read_hardware()
        self.engine = Engine(
            PlannedModel(self.subject.shape, self.plan),
            self.kernels,
            self.store,
            self.disk,
            self.folder.state,
            costs_of(hardware, self.plan),
            needs,
            modules=self.subject.modules,
            device=make_device(hardware, self.plan),
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
            self._take_up(head)
        return head

    def _restore(self, damage: DamagedFile) -> Head:
        """Go back to the newest snapshot that is whole; the error if there is none."""
        found = snapshots(self.disk, self.folder.state, self.kernels.crc32c)
        for path in reversed(found):
            self.sender.send("note", text=f"{damage.cause} Going back to {path.name}.")
            self.store.close()
            self.store = self._make_store()
            try:
                head = self._copy(path, "restore")
            except DamagedFile as another:
                damage = another
                continue
            self._take_up(head)
            return head
        raise damage

    def _take_up(self, head: Head) -> None:
        self.step, self.tokens = head.step, head.tokens

    def _copy(self, path: Path, phase: str) -> Head:
        """Make the state in another folder this run's."""
        with StateReader.open(self.disk, path, self.kernels.crc32c) as reader:
            buffer = aligned_buffer(reader.layout.chunk_bytes)
        return restore(self.store, path, buffer, self._report(phase))

    def _import(self) -> None:
        self.sender.send("phase", name="load")
        report = self._report("load")
        self.store.create_files()
        with self.subject.source(self.disk, self.kernels) as source:
            import_weights(self.store, self.subject.shape, source, self._progress(0), report)

    def _report(self, phase: str) -> Callable[[int, int], None]:
        """Tell the parent how far a phase is, now and then; stop if a signal came."""

        def report(done: int, total: int) -> None:
            self.signals.check()
            now = time.monotonic()
            if now - self._sent > PROGRESS_SECONDS or done == total:
                self._sent = now
                self.sender.send("progress", phase=phase, done=done, total=total, **memory_now())

        return report

    def _progress(self, step: int) -> Progress:
        return Progress(
            step=step,
            cursor=self._cursor(step),
            tokens=self.tokens,
            data=self.request.data_key,
            data_cursor=self.request.data_cursor,
            data_tokens=self.request.data_tokens,
            numerics=self.plan.numerics,
            job_hash=job_hash(self.job),
            model=self.subject.record,
        )

    def _cursor(self, step: int) -> int:
        """Rows of all steps before `step`."""
        numerics = self.plan.numerics
        return rows_before(numerics.growth, numerics.rows, step)

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
        self._record()
        self._open_log()
        total = self.request.total_steps
        self.sender.send("start", step=self.step, total=total, **memory_now())
        self._look_if_due(total)  # what a stop after the last commit left out
        self._snapshot_if_due()
        while self.step < total and not self._stops_early():
            self._check_time()
            self._train_step(total)
            self._look_if_due(total)
        self._settle()
        self._look()
        self._export()
        self.sender.send("done", step=self.step, measured=self.measured.summary(), **memory_now())

    def _open_log(self) -> None:
        log, every = Log(self.folder.log, self.step, self.disk), self.job.logging.logging_steps
        self._journal = Journal(log, every)
        for text in log.notes(every):
            self.sender.send("note", text=text)
        if self.request.changed:
            log.write({"step": self.step, "changed": list(self.request.changed)})
        self._looks = Looks(
            self.request,
            self.job,
            self.subject.reading,
            self.engine,
            log,
            self.sender,
            self.signals,
            self._report,
        )

    def _record(self) -> None:
        """What the run is trained with from here on is in HEAD before a step is."""
        head, now = self.store.head, self._progress(self.step)
        if head is not None and any(getattr(head, key) != getattr(now, key) for key in Progress.model_fields):
            self.store.commit(now)

    def _stops_early(self) -> bool:
        if not stops(self.journal.log.entries, self.job.train):
            return False
        waited = self.job.train.early_stop_patience
        self.sender.send(
            "note",
            text=f"Stopping early after step {self.step}: {waited} evaluations without improvement "
            f"of {self.job.train.best_metric}.",
        )
        return True

    def _check_time(self) -> None:
        """Raise TimeIsUp where a step as long as the longest so far would not end in time. One step
        at least is made in each start."""
        limit = self.request.seconds
        if limit is None or not self._longest:
            return
        if time.monotonic() - self._began + self._longest > limit:
            self._commit(self.step)
            raise TimeIsUp(
                f"Stopped after step {self.step} of {self.request.total_steps}: "
                f"`train.max_minutes` = {self.job.train.max_minutes:g} leaves no time for another.",
                "the last commit is kept; the same command carries on from it",
            )

    def _look_if_due(self, total: int) -> None:
        step, every = self.step, self.job.train.eval_steps
        if step < total and (step == 0 or (every and step % every == 0)):
            self._look()

    def _keeps(self, step: int) -> bool:
        """Whether a full copy of a step is due."""
        every = self.plan.checkpoint.snapshot_steps
        return bool(every and step and step % every == 0)

    def _snapshot_if_due(self) -> None:
        """Copy the commit that a run goes on from, where its snapshot was cut off."""
        if self._keeps(self.step) and not self.looks.has_snapshot(self.step):
            self.looks.snapshot(self.step, self.plan.checkpoint.snapshots_kept)

    def _tell_snapshots(self) -> None:
        for step, path in self.engine.snapshots_made():
            self.sender.send("snapshot", step=step, path=str(path))

    def _settle(self) -> None:
        """Commit all steps. A signal cuts this short only where that loses no more than a step."""
        self._commit(self.step, self.signals if self._commits_every_step else None)
        self.signals.check()

    def _commit(self, step: int, stopping: Callable[[], bool] | None = None) -> None:
        """Apply what is pending and make all steps up to this, the last, durable."""
        self.engine.settle(self._progress(step), stopping)
        self._tell_snapshots()

    def _train_step(self, total: int) -> None:
        numerics, step, began = self.plan.numerics, self.step, time.monotonic()
        self.sender.send("phase", name="step")
        rows = rows_at(numerics.growth, numerics.rows, step)
        cursor = self._cursor(step) - self.request.data_cursor
        fetching = time.monotonic()
        ids, batches, targets = self.subject.step(cursor, numerics.cut(rows))
        fetched = time.monotonic() - fetching
        update = update_at(numerics, len(self.engine.model.groups), step)
        rate = update.learning_rate
        self.tokens += targets
        keeps = self._keeps(step + 1)
        commit = keeps or (step + 1) % self.plan.checkpoint.commit_steps == 0 or step + 1 == total
        self.journal.begin(step + 1, rate, self.tokens, ids, began, fetched)
        try:
            with self._running_out():
                result = self.engine.step(
                    batches,
                    targets,
                    update,
                    self._progress(step + 1),
                    commit,
                    snapshot=keeps,
                    stopping=self._stop_now,
                )
        except (Stopped, OutOfMemory):
            self.journal.drop()
            self.tokens -= targets
            # Nothing of this step has touched the state: what came before it can be kept.
            if self.engine.clean:
                self._commit(step)
            raise
        self.step = step + 1
        seconds = time.monotonic() - began
        self._longest = max(self._longest, seconds)
        self.measured.add(result, seconds)
        outcome = result.outcome
        self.journal.end(outcome)
        self.sender.send(
            "step",
            step=self.step,
            loss=outcome.loss,
            learning_rate=rate,
            grad_norm=outcome.grad_norm,
            seconds=seconds,
            tokens=sum(batch.tokens for batch in batches),
            **memory_now(),
        )
        keep_budget(self.request.ram_bytes, numerics)
        self._tell_snapshots()
        if self.signals():
            self._commit(self.step)
            raise self.signals.error()

    def _stop_now(self) -> bool:
        """A step is left at once where that loses no more than this step; else it is finished."""
        if not self.signals():
            return False
        return self._commits_every_step or self.engine.clean

    def _before_commit(self, progress: Progress) -> None:
        if self._journal is not None:
            self._journal.before_commit(progress.step, self.engine.runtime.state.outcome)

    @contextmanager
    def _running_out(self) -> Iterator[None]:
        """An allocation that fails becomes an OutOfMemory, with the limit taken off so that the
        state can still be written."""
        try:
            yield
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            unlimit_data()
            raise out_of_memory(error) from None

    def _look(self) -> None:
        """Evaluate and sample, unless the log has it; keep the best step."""
        # Resident state that is to be committed can wait for the next step, where that costs no time.
        if self.plan.placement.state == "disk" or self.engine.update_pending:
            self._settle()
        try:
            with self._running_out():
                self.looks.evaluate(self.step)
            self.looks.sample(self.step)
        except (Stopped, PackmuleError):
            self._commit(self.step)
            raise
        if self.looks.is_best(self.step):
            self._settle()
            self.looks.keep_best(self.step)

    def _export(self) -> None:
        self.sender.send("phase", name="export")
        self._check_room(self.folder.final, self.subject.export_bytes)
        with self.store.reader() as reader:
            self.subject.export(self.folder.final, exporter(reader, self.signals.check))
        self.sender.send("export", path=str(self.folder.final), **memory_now())

    def _check_room(self, path: Path, needed: int) -> None:
        """Say what is missing before anything is written."""
        free = self.disk.free_bytes(path.parent)
        if needed > free:
            raise DiskError(
                f"{path}: the disk is full: {needed:,} bytes to write, {free:,} bytes free.",
                f"free at least {needed - free:,} bytes there, then run the same command",
            )
