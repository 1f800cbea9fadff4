"""A training run whose every byte is known: planes updated by arithmetic, streamed through a
StateStore, with commits, snapshots, power losses and killed processes on the way."""

from __future__ import annotations

import random
import zlib
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import numpy as np
from recording_disk import Killed, RecordingDisk

from packmule.checkpoint.head import Progress
from packmule.checkpoint.layout import StateLayout
from packmule.checkpoint.reader import StateReader
from packmule.checkpoint.snapshots import SnapshotWriter, rotate, snapshot, snapshot_path, snapshots
from packmule.checkpoint.store import StateStore
from packmule.shapes.model import Block, Parameter
from packmule.spec.plan import Numerics, OptimizerNumerics, ScheduleNumerics
from packmule.tiers.disk import Disk, aligned_buffer

RUN = Path("/outputs/run")
BLOCKS = (
    Block(0, "embed", "embed", (Parameter("weight", (40, 32), "embedding"),)),
    Block(
        1,
        "layer0",
        "layer",
        (Parameter("norm1.weight", (32,), "norm"), Parameter("q.weight", (32, 32), "matrix")),
    ),
    Block(2, "head", "head", (Parameter("norm.weight", (32,), "norm"),)),
)
LAYOUT = StateLayout.of(BLOCKS, ("master", "m", "v"), "float32", 4096)
NUMERICS = Numerics(
    precision="fp32",
    micro_rows=(2, 2),
    max_seq_length=16,
    loss_chunk=16,
    clip=1.0,
    optimizer=OptimizerNumerics(),
    schedule=ScheduleNumerics(learning_rate=1e-3, total_steps=100),
    seed=7,
    threads=1,
    kernels="torch",
    torch="0",
    cpu_features=(),
)


def progress(step: int) -> Progress:
    """What a commit of `step` stores."""
    return Progress(
        step=step,
        cursor=4 * step,
        tokens=60 * step,
        numerics=NUMERICS,
        job_hash="0" * 64,
        model={"vocab_size": 40},
    )


@cache
def contents(step: int) -> tuple[tuple[bytes, ...], ...]:
    """The bytes of every chunk after `step` steps, [block][chunk]; each step is a function of
    the one before, as an optimizer's is."""
    if step == 0:
        rng = np.random.default_rng(5)
        return tuple(
            tuple(rng.bytes(chunk.bytes) for chunk in LAYOUT.chunks(block)) for block in range(len(BLOCKS))
        )
    return tuple(tuple(_next(old, step) for old in block) for block in contents(step - 1))


def _next(old: bytes, step: int) -> bytes:
    words = np.frombuffer(old, np.uint64)
    return (words * np.uint64(6364136223846793005) + np.uint64(step)).tobytes()


def new_store(disk: Disk, run: Path = RUN) -> StateStore:
    """A store whose checksum is fast everywhere; the real one is tested where it matters."""
    return StateStore(disk, run, LAYOUT, zlib.crc32)


def write_all(store: StateStore, step: int, read_first: bool, writer: SnapshotWriter | None = None) -> None:
    """Bring every block to `step`: streamed chunk by chunk from the one before, or from memory; to a
    snapshot too, if one is under way."""
    buffer = aligned_buffer(LAYOUT.chunk_bytes)
    for block, chunks in enumerate(contents(step)):
        store.begin(block)
        for index, data in enumerate(chunks):
            if read_first:
                store.read(block, index, buffer)
                assert _next(bytes(buffer[: len(data)]), step) == data
            buffer[: len(data)] = data
            store.write(block, index, buffer)
            if writer:
                writer.write_many(block, [(index, buffer)])
        store.end(block)


@dataclass
class Promise:
    """What a power loss now must leave: the commit `low` or, while it is being made, `high`;
    and every snapshot that is `kept`."""

    low: int | None = None
    high: int = 0
    kept: set[int] = field(default_factory=set)


@dataclass(frozen=True)
class Scenario:
    """One run: commit and snapshot intervals, how planes are written, where the process dies."""

    steps: int
    commit_steps: int
    snapshot_steps: int | None
    streamed: bool
    background: bool = False
    kill_at: int | None = None
    run: Path = RUN

    @classmethod
    def draw(cls, rng: random.Random) -> Scenario:
        every = rng.choice((1, 3))
        return cls(
            steps=every * rng.choice((2, 3)),
            commit_steps=every,
            snapshot_steps=rng.choice((None, every)),
            streamed=rng.random() < 0.5,
            background=rng.random() < 0.5,
            kill_at=rng.choice((None, rng.randrange(40), rng.randrange(40))),
        )


def train(disk: Disk, scenario: Scenario, promise: Promise) -> None:
    """Start or resume the run and carry it to its last step, keeping `promise` up to date."""
    store = new_store(disk, scenario.run)
    buffer = aligned_buffer(LAYOUT.chunk_bytes)
    head = store.load()
    if head is None:
        store.create_files()
        write_all(store, 0, read_first=False)
        store.commit(progress(0))
        promise.low = 0
    else:
        promise.low = promise.high = head.step
    for step in range(promise.low + 1, scenario.steps + 1):
        due = step % scenario.commit_steps == 0
        kept = due and scenario.snapshot_steps is not None and step % scenario.snapshot_steps == 0
        writer = None
        if kept and scenario.background:
            writer = SnapshotWriter(store, snapshot_path(scenario.run, step))
        if scenario.streamed or due:
            write_all(store, step, scenario.streamed, writer)
        if due:
            promise.high = step
            store.commit(progress(step))
            promise.low = step
        if kept:
            promise.kept.discard(step)  # one left by a killed process is replaced
            writer.seal() if writer else snapshot(store, buffer)
            promise.kept = {step}
            rotate(disk, scenario.run, 1, store.checksum)
    store.close()


def check(disk: Disk, promise: Promise) -> None:
    """Recover on `disk` and hold every byte against the promise.

    Raises: whatever shows that the promise is broken.
    """
    store = new_store(disk)
    head = store.load()
    if head is None:
        assert promise.low is None, f"commit {promise.low} is lost"
    else:
        assert head.step in (promise.low, promise.high), f"step {head.step} of {promise}"
        assert head.cursor == 4 * head.step
        compare(store, head.step)
    found = snapshots(disk, RUN, store.checksum) if disk.exists(RUN) else ()
    for path in found:
        with StateReader.open(disk, path, store.checksum) as reader:
            assert path == snapshot_path(RUN, reader.head.step)
            compare(reader, reader.head.step)
    lost = {snapshot_path(RUN, step) for step in promise.kept} - set(found)
    assert not lost, f"snapshots {lost} are lost"


def compare(source: StateStore | StateReader, step: int) -> None:
    buffer = aligned_buffer(LAYOUT.chunk_bytes)
    for block, chunks in enumerate(contents(step)):
        for index, data in enumerate(chunks):
            source.read(block, index, buffer)
            assert buffer[: len(data)] == data, f"step {step} block {block} chunk {index}"


def search(seed: int, states: int, dropped: str | None = None) -> tuple[int, str | None, set[str]]:
    """Cut the power at random moments of random runs and recover from random remains.

    Returns:
        States tried, what went wrong in the last one (None if nothing did), and the sites
        that synced.
    """
    rng = random.Random(seed)
    sites: set[str] = set()
    tried, fault = 0, None
    promise = Promise()

    def cut(disk: RecordingDisk) -> None:
        nonlocal tried, fault
        writing = disk.log[-1].startswith("write /")
        for _ in range(int(rng.random() < 0.2) if writing else 3):
            if fault is None and tried < states:
                tried += 1
                try:
                    check(disk.after_power_loss(rng), promise)
                except Exception as error:
                    fault = f"after {disk.log[-1]}: {error!r}"
                    raise

    while tried < states and fault is None:
        scenario, promise = Scenario.draw(rng), Promise()
        disk = RecordingDisk(after=cut, kill_at=scenario.kill_at, dropped=dropped)
        try:
            try:
                train(disk, scenario, promise)
            except Killed:
                again = RecordingDisk(disk.root, after=cut, dropped=dropped)
                sites |= disk.sites
                disk = again
                train(disk, scenario, promise)
        except Exception:
            if fault is None:
                raise
        sites |= disk.sites
    return tried, fault, sites
