"""Bytes that changed and files that are cut short: named, and the newest whole snapshot resumes."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from jobs import PARTIAL, SNAPSHOT_EVERY, STEPS, Base, Job, compare, log_of, some
from processes import Result

from packmule.checkpoint.reader import StateReader
from packmule.kernels import checksum
from packmule.tiers.disk import PosixDisk

PLAN = "on-backward"
Damage = Callable[[Path, random.Random], None]


@pytest.fixture
def base(tmp_path_factory: pytest.TempPathFactory) -> Base:
    return Base.of(tmp_path_factory.getbasetemp())


def flip(path: Path, at: int, rng: random.Random) -> None:
    """Change one bit of one byte."""
    data = bytearray(path.read_bytes())
    data[at] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


def flip_any(path: Path, rng: random.Random) -> None:
    flip(path, rng.randrange(path.stat().st_size), rng)


def cut(path: Path, rng: random.Random) -> None:
    """Keep a random part, at most all but one byte."""
    size = rng.randrange(path.stat().st_size)
    with path.open("r+b") as file:
        file.truncate(size)


def flip_state(run: Path, rng: random.Random) -> None:
    """One byte of the planes that HEAD names."""
    with StateReader.open(PosixDisk(), run, checksum()) as reader:
        layout, head = reader.layout, reader.head
    block = rng.randrange(len(layout.blocks))
    index = rng.randrange(len(layout.chunks(block)))
    at = layout.chunk_offset(block, head.blocks[block].slot, index)
    flip(run / "state.bin", at + rng.randrange(layout.chunks(block)[index].bytes), rng)


DAMAGES: dict[str, tuple[Damage, str]] = {
    "flipped state": (flip_state, "state.bin"),
    "cut state": (lambda run, rng: cut(run / "state.bin", rng), "state.bin"),
    "flipped HEAD": (lambda run, rng: flip_any(run / "HEAD.json", rng), "HEAD.json"),
    "cut HEAD": (lambda run, rng: cut(run / "HEAD.json", rng), "HEAD.json"),
}
"""What is done to a run, and the file that must be named."""


def notes(result: Result) -> str:
    return "\n".join(event["text"] for event in result.named("note"))


def resumed_at(result: Result) -> int:
    return int(result.named("start")[0]["step"])


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_named_and_the_newest_snapshot_resumes(
    base: Base, tmp_path: Path, name: str, seed: int
) -> None:
    damage, file = DAMAGES[name]
    job = base.partial(tmp_path / "run", PLAN)
    damage(job.out, random.Random(seed))
    result = job.run()
    assert result.code == 0, result.err
    assert str(job.out / file) in notes(result) and f"checkpoint-{SNAPSHOT_EVERY}" in notes(result)
    assert resumed_at(result) == SNAPSHOT_EVERY
    compare(job.out, base.expected(PLAN))


def test_damage_without_a_snapshot_is_refused_by_name(
    base: Base, tmp_path: Path, seed: int, long: bool
) -> None:
    rng = random.Random(seed)
    for name in some(DAMAGES, rng, long):
        damage, file = DAMAGES[name]
        job = base.partial(tmp_path / name, PLAN, save_steps="null")
        damage(job.out, rng)
        message = job.run().refused(4, str(job.out / file))
        if name == "flipped state":
            assert all(word in message for word in ("block", "chunk"))


def test_a_damaged_snapshot_gives_way_to_the_one_before(base: Base, tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    job = base.copy(tmp_path / "run", PLAN)
    shutil.rmtree(job.out / "final")  # else there is nothing left to do
    flip_state(job.out, rng)
    flip_state(job.out / f"checkpoint-{STEPS}", rng)
    result = job.run()
    assert result.code == 0, result.err
    assert f"checkpoint-{STEPS}/state.bin" in notes(result)
    assert resumed_at(result) == SNAPSHOT_EVERY
    compare(job.out, base.expected(PLAN))


def test_the_final_evaluation_is_repeated_after_going_back(base: Base, tmp_path: Path, seed: int) -> None:
    job = base.copy(tmp_path / "run", PLAN)
    shutil.rmtree(job.out / "final")
    shutil.rmtree(job.out / f"checkpoint-{STEPS}")
    flip_state(job.out, random.Random(seed))
    result = job.run()
    assert result.code == 0, result.err
    assert resumed_at(result) == SNAPSHOT_EVERY
    assert [event["step"] for event in result.named("evaluation")] == [8, STEPS]
    compare(job.out, base.expected(PLAN))


def test_a_missing_HEAD_is_no_fresh_start_where_there_are_snapshots(base: Base, tmp_path: Path) -> None:
    job = base.partial(tmp_path / "run", PLAN)
    (job.out / "HEAD.json").unlink()
    result = job.run()
    assert result.code == 0, result.err
    assert "HEAD.json" in notes(result)
    assert resumed_at(result) == SNAPSHOT_EVERY
    compare(job.out, base.expected(PLAN))


Log = list[tuple[Any, ...]]


def entries_but_of(log: Log, *steps: int) -> Log:
    """Without those of some steps, and without the noise scale: a running mean over the log itself,
    so that a lost entry shows in those after it."""
    return [
        tuple(item for item in entry if item[0] != "train/noise_scale")
        for entry in log
        if dict(entry)["step"] not in steps or "train/loss" not in dict(entry)
    ]


def test_a_torn_log_is_told_and_goes_on(base: Base, tmp_path: Path) -> None:
    job = base.partial(tmp_path / "run", PLAN)
    path = job.out / "log.jsonl"
    path.write_bytes(path.read_bytes()[:-10])
    result = job.run()
    assert result.code == 0, result.err
    at = resumed_at(result)
    assert at >= PARTIAL and f"log.jsonl: the entries of steps {at} to {at} are lost" in notes(result)
    assert entries_but_of(log_of(job.out)) == entries_but_of(base.expected(PLAN).log, at)


def test_a_flipped_log_line_is_told_and_dropped(base: Base, tmp_path: Path) -> None:
    job = base.partial(tmp_path / "run", PLAN)
    path = job.out / "log.jsonl"
    lines = path.read_bytes().split(b"\n")
    number = next(n for n, line in enumerate(lines) if line.startswith(b'{"step": 3, "train'))
    lines[number] = b"\xff" + lines[number][1:]  # neither JSON nor UTF-8
    path.write_bytes(b"\n".join(lines))
    result = job.run()
    assert result.code == 0, result.err
    assert "log.jsonl: 1 damaged line" in notes(result)
    assert entries_but_of(log_of(job.out)) == entries_but_of(base.expected(PLAN).log, 3)


def test_an_overwritten_record_is_made_again_or_named(
    base: Base, tmp_path: Path, seed: int, long: bool
) -> None:
    rng = random.Random(seed)
    for name in some(("config.yaml", "plan.json", "probe.json"), rng, long):
        job = base.partial(tmp_path / name, PLAN)
        (job.out / name).write_bytes(b"\xff\x00" + rng.randbytes(20))
        result = job.run()
        if name == "config.yaml":  # what the run promised is not known any more
            result.refused(4, str(job.out / name), "is damaged")
        else:
            assert result.code == 0, result.err
            compare(job.out, base.expected(PLAN))


def test_cut_data_is_named_or_made_again(base: Base, tmp_path: Path, seed: int, long: bool) -> None:
    rng = random.Random(seed)
    for name in some(("tokens.bin", "documents.bin", "pieces.bin", "lengths.bin", "rows.bin"), rng, long):
        job = base.partial(tmp_path / name, PLAN)
        path = rng.choice(sorted((job.out / "data").glob(f"*/{name}")))
        cut(path, rng)
        check_survived(base, job, job.run(), path)


def check_survived(base: Base, job: Job, result: Result, path: Path) -> None:
    """The damage did no harm, or is named."""
    if result.code == 0:
        compare(job.out, base.expected(PLAN))
    else:
        assert result.code in (2, 4), result.err
        result.refused(result.code, path.name)


def test_any_flipped_byte_of_a_run_is_harmless_or_named(
    base: Base, tmp_path: Path, seed: int, long: bool
) -> None:
    rng = random.Random(seed)
    for number in range(60 if long else 1):
        job = base.partial(tmp_path / f"run{number}", PLAN)
        files = sorted(p for p in job.out.rglob("*") if p.is_file() and p.stat().st_size and checked(p))
        path = rng.choice(files)
        flip_any(path, rng)
        result = job.run()
        print(f"{path.relative_to(job.out)}: code {result.code}")
        assert "Traceback" not in result.err and result.code != 1, result.err
        if result.code == 0:
            assert json.loads((job.out / "HEAD.json").read_text())["step"] == STEPS


def checked(path: Path) -> bool:
    """Not free text of the run, nor what only a checksum of its own could tell."""
    return path.suffix in (".json", ".yaml", ".bin") and path.name not in ("tokens.bin", "report.json")
