"""SIGTERM and SIGINT in every phase of a run, the death of either process, and two at one run."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest
from jobs import SNAPSHOT_EVERY, STEPS, Base, Job, compare, during_snapshot, head_step
from processes import DEADLINE, alive, gone

STOP_SECONDS = 20.0
"""A stop takes a second or two; the rest is for a machine that is busy."""

PHASES = {
    "ram": ("load", "evaluation", "step", "step", "snapshot", "export"),
    "on-fetch": ("start", "load", "evaluation", "sample", "step", "snapshot", "step", "export"),
    "on-backward": ("plan", "step", "snapshot"),
}


@pytest.fixture
def base(tmp_path_factory: pytest.TempPathFactory) -> Base:
    return Base.of(tmp_path_factory.getbasetemp())


def stop(job: Job, phase: str, rng: random.Random) -> bool:
    """Start, send a signal somewhere in a phase, and check how that ends.

    Returns:
        Whether the run is over: the signal came after its last step, and too late.
    """
    number = rng.choice((signal.SIGTERM, signal.SIGINT))
    before = head_step(job.out)
    if before == STEPS and phase != "export":
        return False  # the signal before came after the last step: only the export is left
    with job.start() as running:
        if phase == "start":
            time.sleep(rng.uniform(0.3, 1.5))
        elif phase == "plan":
            running.until(lambda event: event["event"] == "plan")
            time.sleep(rng.uniform(0, 2))
        elif phase == "snapshot":
            during_snapshot(running, job)
            time.sleep(rng.uniform(0, 0.03))
        else:
            assert running.until_phase(phase, rng.randint(1, 2) if phase == "step" else 1)
            time.sleep(rng.uniform(0, 0.03))
        running.send(number)
        result = running.end()
    step, head = result.last_step, head_step(job.out)
    print(f"{number.name} in {phase}: code {result.code}, {result.seconds:.2f} s, step {step}, commit {head}")
    assert head >= before
    if result.code == 0:
        assert phase in ("snapshot", "export") and result.named("done") and head == STEPS
        return True
    name = f"Stopped by {number.name}" if phase != "start" else ""
    assert result.code == 128 + number and name in result.err, result.err
    assert "Traceback" not in result.err
    assert result.seconds < STOP_SECONDS
    assert head >= step - 1
    return False


@pytest.mark.parametrize("plan", PHASES)
def test_a_signal_in_any_phase_loses_at_most_one_step(
    base: Base, tmp_path: Path, plan: str, seed: int, long: bool
) -> None:
    rng = random.Random(seed)
    expected = base.expected(plan)
    for number in range(8 if long else 1):
        job = base.job(tmp_path / f"run{number}", plan)
        for phase in PHASES[plan]:
            if stop(job, phase, rng):
                break
        result = job.run()
        assert result.code == 0, result.err
        compare(job.out, expected)


def test_state_in_ram_is_committed_by_a_signal_between_commits(base: Base, tmp_path: Path) -> None:
    job = base.job(tmp_path / "run", "ram", eval_steps="null", save_steps="null")
    with job.start() as running:
        assert running.until(lambda event: event["event"] == "step" and event["step"] == 3)
        running.send(signal.SIGTERM)
        result = running.end()
    assert result.code == 143
    assert head_step(job.out) >= result.last_step >= 3


def test_a_killed_child_is_explained_and_the_same_command_carries_on(
    base: Base, tmp_path: Path, seed: int
) -> None:
    job = base.job(tmp_path / "run", "on-backward")
    with job.start() as running:
        assert running.until_phase("step", random.Random(seed).randint(2, 5))
        (child,) = running.children()
        os.kill(child, signal.SIGKILL)
        result = running.end(STOP_SECONDS)
    message = result.refused(5, "SIGKILL", "the last commit is kept")
    assert "run the same command again" in message
    assert head_step(job.out) >= result.last_step >= 1
    resumed = job.run()
    assert resumed.code == 0 and resumed.named("start")[0]["step"] >= result.last_step
    compare(job.out, base.expected("on-backward"))


@pytest.mark.parametrize("plan", ["ram", "on-fetch"])
def test_a_killed_parent_takes_its_child_along_and_frees_the_run(
    base: Base, tmp_path: Path, plan: str, seed: int
) -> None:
    job = base.job(tmp_path / "run", plan)
    with job.start() as running:
        # Late enough that state in RAM would lose steps, were it not committed.
        assert running.until_phase("step", random.Random(seed).choice((4, 8)))
        (child,) = running.children()
        running.send(signal.SIGKILL)
        result = running.end()
        assert gone(child, STOP_SECONDS)
    assert head_step(job.out) >= result.last_step - 1  # the child stops as with SIGTERM
    resumed = job.run()
    assert resumed.code == 0, resumed.err
    compare(job.out, base.expected(plan))


def test_a_parent_killed_while_it_prepares_leaves_no_child(base: Base, tmp_path: Path) -> None:
    job = base.job(tmp_path / "run", "on-fetch")
    with job.start() as running:
        limit = time.monotonic() + DEADLINE
        while not (children := running.children()):
            assert time.monotonic() < limit
            time.sleep(0.005)
        running.send(signal.SIGKILL)
        running.end()
        assert all(gone(child, STOP_SECONDS) for child in children)


def test_a_second_process_is_refused_and_harms_nothing(base: Base, tmp_path: Path) -> None:
    job = base.job(tmp_path / "run", "on-backward")
    with job.start() as running:
        assert running.until_phase("step")
        (child,) = running.children()
        os.kill(child, signal.SIGSTOP)
        try:
            second = job.run()
        finally:
            os.kill(child, signal.SIGCONT)
        first = running.end()
    second.refused(2, f"in use by process {running.process.pid}")
    assert second.events == ()
    assert first.code == 0, first.err
    compare(job.out, base.expected("on-backward"))


def test_a_third_signal_kills(base: Base, tmp_path: Path) -> None:
    job = base.job(tmp_path / "run", "on-fetch")
    with job.start() as running:
        assert running.until_phase("step")
        (child,) = running.children()
        os.kill(child, signal.SIGSTOP)  # it cannot answer
        for _ in range(3):
            running.send(signal.SIGTERM)
            time.sleep(0.1)  # equal signals that wait are one
        result = running.end(STOP_SECONDS)
        assert not alive(child)
    result.refused(143, "third signal", "SIGTERM")
    assert head_step(job.out) >= result.last_step - 1


def test_a_stop_while_an_evaluation_runs_repeats_it_after_the_resume(base: Base, tmp_path: Path) -> None:
    job = base.job(tmp_path / "run", "on-fetch")
    with job.start() as running:
        assert running.until_phase("evaluation", 2)
        (child,) = running.children()
        os.kill(child, signal.SIGKILL)
        first = running.end()
    second = job.run()
    assert first.code == 5 and second.code == 0, second.err
    told = [event["step"] for event in (*first.named("evaluation"), *second.named("evaluation"))]
    assert sorted(set(told)) == [0, 4, 8, STEPS]
    assert sorted(path.name for path in job.out.glob("checkpoint-*")) == [
        f"checkpoint-{step}" for step in (STEPS, SNAPSHOT_EVERY)
    ]
    compare(job.out, base.expected("on-fetch"))
