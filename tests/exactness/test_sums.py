"""Checksums of state in RAM: taken by the update of a step that is stored, and by nobody else again."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from tests.exactness.runs import (
    BADAM,
    HIFT,
    Case,
    keeps,
    make_case,
    make_plan,
    progress,
    step_engine,
    tiny_shape,
)
from tests.exactness.test_phases import NEEDS, evaluation_rows, groups
from tests.fault.recording_disk import RecordingDisk

from packmule.checkpoint.head import read_head, state_layout
from packmule.checkpoint.reader import StateReader, checksums_of
from packmule.checkpoint.snapshots import snapshot_path
from packmule.engine import stored
from packmule.engine.engine import Engine
from packmule.engine.runtime import Runtime
from packmule.errors import DamagedFile
from packmule.graph.kinds import BufferKind, Tier
from packmule.kernels.contract import Kernels
from packmule.kernels.transfers import Span
from packmule.optim.schedules import update_at
from packmule.spec.plan import Placement
from packmule.tiers.disk import Checksum, aligned_buffer

RUN = Path("/run")
STEPS = 6

PLANS: Mapping[str, Mapping[str, object]] = {
    "after-backward": {},
    "after-backward, factors": {"optimizer": {"rule": "adalomo"}},
    "on-backward": {"update": "on-backward", "clip": None, "micro_rows": (2, 1)},
    "on-backward, two passes, one plane": {"update": "on-backward", "optimizer": {"rule": "lomo"}},
    "on-fetch": {"update": "on-fetch", "placement": Placement(state="ram", weights="ram")},
    "on-fetch, gradients on disk": {
        "update": "on-fetch",
        "placement": Placement(state="ram", weights="disk", gradients="disk"),
    },
    "hift": {"update": "on-backward", "clip": None, "turns": HIFT},
    "badam": {"turns": BADAM},
    "vocabulary in parts": {"vocabulary_parts": 3, "precision": "fp32"},
    "device": {"device": True, "update": "on-backward", "clip": None, "device_updates": 40},
}


def _entry(byte: int) -> int:
    for _ in range(8):
        byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)
    return byte


TABLE = [_entry(byte) for byte in range(256)]


def crc32c(data: bytes) -> int:
    """Byte by byte."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ TABLE[(crc ^ byte) & 255]
    return crc ^ 0xFFFFFFFF


class SummingDisk(RecordingDisk):
    """Knows how many chunks it was asked to sum while it wrote them."""

    def __init__(self) -> None:
        super().__init__()
        self.summed = 0

    def write_summed(self, handle: object, spans: Sequence[Span], checksum: Checksum | None) -> list[int]:
        self.summed += len(spans) * (checksum is not None)
        return super().write_summed(handle, spans, checksum)  # type: ignore[arg-type]


def case_of(name: str, kernels: Kernels, seed: int, **more: object) -> Case:
    plan = make_plan(**{"steps": STEPS, **PLANS[name], **more})
    return make_case(tiny_shape(tied=seed % 2 == 0), plan, 0, seed, kernels)


def opened(case: Case, kernels: Kernels, disk: RecordingDisk) -> Engine:
    case.start(RUN, kernels, disk)
    engine, _ = case.open(RUN, kernels, disk, needs=NEEDS)
    if isinstance(disk, SummingDisk):
        disk.summed = 0
    return engine


def check_sums(disk: RecordingDisk, folder: Path, kernels: Kernels) -> int:
    """Every chunk that HEAD.json names sums to what it says; the commit's step."""
    head = read_head(disk, folder, kernels.crc32c)
    assert head is not None
    layout, image = state_layout(head, folder / "HEAD.json"), disk.read_bytes(folder / "state.bin")
    sums = checksums_of(head, layout)
    for block, place in enumerate(head.blocks):
        for index, chunk in enumerate(layout.chunks(block)):
            at = layout.chunk_offset(block, place.slot, index)
            found = crc32c(image[at : at + chunk.bytes])
            assert found == sums[block][index], (folder, head.step, block, index)
    return head.step


@pytest.mark.parametrize("name", PLANS)
def test_commits_and_snapshots_hold_the_sums_of_their_bytes(
    name: str, kernels: Kernels, rng: random.Random, seed: int
) -> None:
    """Settled, evaluated and resumed in between, or not."""
    every = rng.choice((1, 3))
    case = case_of(name, kernels, seed, commit_steps=every, snapshot_steps=2, snapshots_kept=9)
    disk = RecordingDisk()
    engine = opened(case, kernels, disk)
    for step in range(STEPS):
        step_engine(engine, case.data, step)
        check_sums(disk, RUN, kernels)
        chance = rng.random()
        if chance < 0.4:
            engine.settle(progress(case.plan, step + 1))
            assert check_sums(disk, RUN, kernels) == step + 1
        if chance < 0.2:
            engine.close()
            engine, found = case.open(RUN, kernels, disk, needs=NEEDS)
            assert found == step + 1
        elif chance < 0.4:
            engine.evaluate(groups(engine, evaluation_rows(case)))
    engine.settle(progress(case.plan, STEPS))
    engine.close()
    assert check_sums(disk, RUN, kernels) == STEPS
    for step in range(1, STEPS + 1):
        if keeps(case.plan, step):
            assert check_sums(disk, snapshot_path(RUN, step), kernels) == step


@pytest.mark.parametrize("commit_steps", (1, 3))
@pytest.mark.parametrize("name", PLANS)
def test_an_update_sums_what_is_stored_and_nothing_else_does(
    name: str, commit_steps: int, kernels: Kernels, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = case_of(name, kernels, seed, commit_steps=commit_steps, snapshot_steps=3)
    plan, disk, wide = case.plan, SummingDisk(), []
    real = stored.vouch

    def vouch(runtime: Runtime, block: int, chunks: Sequence[stored.Chunk]) -> None:
        wide.extend((block, chunk.number) for chunk in chunks)
        real(runtime, block, chunks)

    monkeypatch.setattr(stored, "vouch", vouch)
    engine = opened(case, kernels, disk)
    layout, model = engine.runtime.store.layout, engine.model
    every = {
        (block, index) for block in range(len(layout.blocks)) for index in range(len(layout.chunks(block)))
    }
    there = {
        (block, layout.index(block, plane, part))
        for block in range(len(layout.blocks))
        for part in model.updates_there(block)
        for plane in range(len(model.planes))
    }
    for step in range(STEPS):
        wide.clear()
        step_engine(engine, case.data, step)
        # on-fetch updates in the graph of the next step, which stores too.
        updated = step - (plan.update == "on-fetch")
        stores = updated >= 0 and (updated + 1) % commit_steps == 0
        group = update_at(plan.numerics, len(model.groups), step).group
        active = range(len(layout.blocks)) if group is None else model.groups[group]
        summed = {(block, index) for block, index in every - there if block in active}
        assert sorted(wide) == (sorted(summed) if stores else [])
    engine.settle(progress(plan, STEPS))
    engine.close()
    commits = STEPS // commit_steps
    if plan.numerics.turns is None or commit_steps == 1:
        # What the device has updated is summed on its way to the disk.
        assert disk.summed == len(there) * commits
    else:
        # So is what groups have updated in steps that were not stored.
        assert 0 < disk.summed < len(every) * commits
    assert check_sums(disk, RUN, kernels) == STEPS


def test_a_commit_between_two_due_ones_is_summed_by_the_disk(kernels: Kernels, seed: int) -> None:
    case, disk = case_of("after-backward", kernels, seed, commit_steps=1000), SummingDisk()
    engine = opened(case, kernels, disk)
    layout = engine.runtime.store.layout
    chunks = sum(len(layout.chunks(block)) for block in range(len(layout.blocks)))
    step_engine(engine, case.data, 0)
    engine.settle(progress(case.plan, 1))
    assert disk.summed == chunks
    assert check_sums(disk, RUN, kernels) == 1
    engine.close()


@pytest.mark.parametrize("name", PLANS)
def test_a_byte_that_flips_between_update_and_store_is_found(
    name: str, kernels: Kernels, rng: random.Random, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By `verify` and by the run that resumes: its checksum is from before."""
    case, disk = case_of(name, kernels, seed), RecordingDisk()
    engine = opened(case, kernels, disk)
    step_engine(engine, case.data, 0)
    engine.settle(progress(case.plan, 1))
    real, damaged = stored.vouch, set()

    def vouch(runtime: Runtime, block: int, chunks: Sequence[stored.Chunk]) -> None:
        real(runtime, block, chunks)
        if not damaged or rng.random() < 0.05:
            chunk = rng.choice(chunks)
            chunk.view[rng.randrange(len(chunk.view))] ^= 1 << rng.randrange(8)
            damaged.add((block, chunk.number))

    monkeypatch.setattr(stored, "vouch", vouch)
    step_engine(engine, case.data, 1)
    engine.settle(progress(case.plan, 2))
    engine.close()
    first = case.shape.blocks()[min(damaged)[0]].name
    with StateReader.open(disk, RUN, kernels.crc32c) as reader:
        assert reader.head.step == 2
        with pytest.raises(DamagedFile, match=f"block {first}, plane .* is damaged"):
            reader.verify(aligned_buffer(reader.layout.chunk_bytes))
    with pytest.raises(DamagedFile, match="is damaged"):
        case.open(RUN, kernels, disk)


def test_a_byte_that_flips_between_a_step_and_the_next_is_found(
    kernels: Kernels, rng: random.Random, seed: int
) -> None:
    """Anywhere in the arena's state, of a block that this step's group has left alone too."""
    case, disk = case_of("hift", kernels, seed), RecordingDisk()
    engine = opened(case, kernels, disk)
    for step in range(2):
        step_engine(engine, case.data, step)
    block = rng.randrange(len(case.shape.blocks()))
    low, size = engine.model.residents.places[BufferKind.STATE, Tier.RAM, block, -1]
    engine.runtime.memory[Tier.RAM][low + rng.randrange(size)] ^= 1 << rng.randrange(8)
    engine.settle(progress(case.plan, 2))
    engine.close()
    with pytest.raises(DamagedFile, match=f"block {case.shape.blocks()[block].name}, plane .* is damaged"):
        case.state(RUN, kernels, disk)
