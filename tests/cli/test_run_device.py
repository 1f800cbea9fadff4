"""`--device fake`: a whole run on a device that is none, and what is said where there is no device."""

from __future__ import annotations

import json

from tests.cli.bench import Bench

DEVICE = ("--device", "fake", "--device-memory", "64MB")


def test_a_run_on_the_fake_device_is_planned_and_goes_on_without_one_with_the_same_bits(bench: Bench) -> None:
    job = bench.job("moved", optim__lr_scheduler="constant", train__max_steps=3)
    whole = bench.run("train", job, "--output-dir", "device_whole", "--json").succeeded()
    there = bench.run("train", job, "--max-steps", "2", *DEVICE, "--json").succeeded()
    plan = json.loads((bench.folder / "moved" / "plan.json").read_text())
    assert plan["device"] == {"name": "fake", "memory_bytes": 64_000_000}
    assert 0 < plan["predicted"]["peak_device_bytes"] <= 64_000_000
    report = json.loads((bench.folder / "moved" / "report.json").read_text())["terms"]
    for key in ("sent_bytes_per_step", "received_bytes_per_step"):
        assert report[key]["measured"] == report[key]["predicted"] > 0
    rest = bench.run("train", job, "--json").succeeded()
    losses = [[event["loss"] for event in done.named("step")] for done in (whole, there, rest)]
    assert losses[0] == losses[1] + losses[2] and len(losses[2]) == 1


def test_a_gpu_that_the_probe_has_not_found_is_refused(bench: Bench) -> None:
    message = bench.run("plan", bench.job("no_device"), "--device", "cuda:0").refused()
    assert "found no such device" in message and "--device cpu" in message
