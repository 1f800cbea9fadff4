"""`kill -9` of either process or of both, at random moments from the first import to the export."""

from __future__ import annotations

import os
import random
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from jobs import LIKE, STEPS, Base, Job, compare, during_snapshot, head_step
from processes import Running, gone

MOMENTS = ("any", "plan", "load", "step", "step", "step", "evaluation", "sample", "snapshot", "export")
VICTIMS = ("child", "parent", "both")
LOSES = {"ram": 5, "on-fetch": 1, "on-backward": 0}
"""Finished steps that a kill of both may lose: less than those between two commits."""


@pytest.fixture
def base(tmp_path_factory: pytest.TempPathFactory) -> Base:
    return Base.of(tmp_path_factory.getbasetemp())


@dataclass
class Kills:
    """What happened so far, for the report."""

    done: int = 0
    late: int = 0
    finished: int = 0


def test_kills_at_random_moments_change_nothing(base: Base, tmp_path: Path, seed: int, long: bool) -> None:
    rng, kills = random.Random(seed), Kills()
    wanted = 200 if long else 10
    plans = list(LIKE)
    rng.shuffle(plans)
    while kills.done < wanted:
        plan = plans[kills.finished % len(plans)]
        job = base.job(tmp_path / f"run{kills.finished}", plan)
        while kills.done < wanted and kill_once(job, plan, rng, kills):
            continue
        result = job.run()
        assert result.code == 0, result.err
        compare(job.out, base.expected(plan))
        kills.finished += 1
    print(f"{kills.done} kills, {kills.late} came too late, {kills.finished} runs compared")


def kill_once(job: Job, plan: str, rng: random.Random, kills: Kills) -> bool:
    """Start and kill; False if the run had finished."""
    moment, victim = rng.choice(MOMENTS), rng.choice(VICTIMS)
    before = head_step(job.out)
    with job.start() as running:
        wait_for(running, job, moment, rng)
        children = running.children()
        if victim != "parent":
            for child in children:
                kill(child)
        if victim != "child" or not children:
            kill(running.process.pid)
        result = running.end()
        assert all(gone(child, 30) for child in children)
    step, head = result.last_step, head_step(job.out)
    print(f"{plan}: {victim} killed in {moment}: code {result.code}, step {step}, commit {head}")
    if result.code == 0:
        kills.late += 1
        return False
    kills.done += 1
    assert head >= before
    assert head >= step - (LOSES[plan] if victim != "parent" else 1)
    if victim == "child" and children:
        result.refused(5, "SIGKILL", "the last commit is kept")
    return head < STEPS or rng.random() < 0.7


def wait_for(running: Running, job: Job, moment: str, rng: random.Random) -> None:
    if moment == "any":
        time.sleep(rng.uniform(0, 2.5))
        return
    if moment == "plan":
        running.until(lambda event: event["event"] == "plan")
        time.sleep(rng.uniform(0, 1))
        return
    if moment == "snapshot":
        during_snapshot(running, job)
    else:
        running.until_phase(moment, rng.randint(1, 3) if moment == "step" else 1)
    time.sleep(rng.uniform(0, 0.03))


def kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return
