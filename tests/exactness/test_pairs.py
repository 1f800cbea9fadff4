"""Same numerics, same bits: the engine under every pair of choices equals the plain loop."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, islice, product
from pathlib import Path

import pytest
import torch
from tests.exactness.pairs import Row, covering_rows, every_row, pairs_of, random_rows
from tests.exactness.runs import BADAM, HIFT, Case, finish, make_case, make_plan, tiny_shape
from tests.fault.recording_disk import RecordingDisk

from packmule.kernels import load
from packmule.kernels.contract import Kernels
from packmule.plan.candidates import allowed
from packmule.spec.plan import Placement, Plan
from packmule.tiers.disk import Disk, PosixDisk, remove_folder

STEPS = 5
TWO_THREADS_STEPS = 2
SAMPLED = 12

AXES = {
    "precision": ("fp32", "bf16-mixed", "bf16-wide"),
    "state": ("ram", "disk"),
    "weights": ("state", "ram", "disk"),
    "gradients": ("ram", "disk"),
    "inputs": ("ram", "disk", "device"),
    "kept_weights": (0, 1, 3),
    "kept_state": (0, 2, 99),
    "device": (False, True),
    "device_weights": (0, 1, 99),
    "device_updates": (0, 40, 100),
    "update": ("after-backward", "on-backward", "on-fetch"),
    "prefetch": (0, 1, 2),
    "micro_rows": ((4,), (3, 1), (1, 1, 1, 1)),
    "order": ("breadth", "depth"),
    "recompute": ((True, True), (False, False), (True, False)),
    "clip": (None, 1.0),
    "rule": ("adamw", "lomo", "adalomo"),
    "turns": (None, HIFT, BADAM),
    "tied": (True, False),
    "commit_steps": (1, 3),
    "snapshot_steps": (None, 2),
    "vocabulary_parts": (1, 2, 5),
    "speculate": (False, True),
}
"""Everything a plan chooses, with precision, split, clip, rule, tie and cut, which also choose bits."""

PLACES = ("state", "weights", "gradients", "inputs", "kept_weights", "kept_state", "device_weights")

NUMERICS = ("precision", "micro_rows", "clip", "tied", "rule", "vocabulary_parts", "turns")


DRAWN = (
    "precision", "order", "recompute", "commit_steps", "snapshot_steps", "kept_weights", "kept_state",
    "device_weights", "device_updates", "speculate",
)  # fmt: skip
"""Drawn anew for each combination of the others: their product with all of them takes hours."""


def one_of_each(rng: random.Random) -> Iterator[Row]:
    """A random row for each combination of what is not DRAWN that has one."""
    for group in product(*(values for name, values in AXES.items() if name not in DRAWN)):
        chosen = zip((name for name in AXES if name not in DRAWN), group, strict=True)
        row = next(random_rows({**AXES, **{name: (value,) for name, value in chosen}}, offered, rng), None)
        if row is not None:
            yield row


def plan_of(row: Row) -> Plan:
    """The plan that a row of choices describes."""
    placement = Placement(**{kind: row[kind] for kind in PLACES})
    choices = {
        name: row[name]
        for name in (
            "precision",
            "update",
            "prefetch",
            "micro_rows",
            "order",
            "recompute",
            "clip",
            "commit_steps",
            "snapshot_steps",
            "vocabulary_parts",
            "turns",
            "device",
            "device_updates",
            "speculate",
        )
    }
    return make_plan(placement=placement, steps=STEPS, optimizer={"rule": row["rule"]}, **choices)


def offered(row: Row) -> bool:
    """Whether the builder has this combination and it differs from others in the list."""
    kept = row["tied"] and row["vocabulary_parts"] > 1  # a part's, until the embedding adds its own
    nothing = row["update"] == "on-backward" and row["gradients"] == "disk" and not kept
    if row["turns"] == BADAM and row["rule"] != "adamw":
        return False
    return allowed(plan_of(row)) and not nothing


class Cases:
    """Plain runs, made once per numerics."""

    def __init__(self, seed: int, kernels: Kernels, steps: int = STEPS) -> None:
        self._seed, self._kernels, self._steps = seed, kernels, steps
        self._made: dict[tuple[object, ...], Case] = {}

    def get(self, row: Row) -> Case:
        key = tuple(row[name] for name in NUMERICS)
        plan = plan_of(row)
        if key not in self._made:
            shape = tiny_shape(row["tied"])
            self._made[key] = make_case(shape, plan, self._steps, self._seed, self._kernels)
        return replace(self._made[key], plan=plan)


def check(case: Case, row: Row, folder: Path, kernels: Kernels, disk: Disk) -> None:
    """A whole run through the engine; nothing of it is left."""
    case.start(folder, kernels, disk)
    _, trace = finish(case, folder, kernels, disk)
    assert trace == case.expected.trace, f"the trace differs for {row}"
    assert case.state(folder, kernels, disk) == (case.steps, case.expected.images[-1]), (
        f"the state differs for {row}"
    )
    assert case.snapshots(folder, kernels, disk) == case.kept(case.steps), f"snapshots differ for {row}"
    for name in disk.list(folder):
        remove_folder(disk, folder / name) if "checkpoint-" in name else disk.remove(folder / name)
    disk.remove(folder)


def test_every_pair_of_choices_gives_the_bits_of_the_plain_loop(
    tmp_path: Path, kernels: Kernels, seed: int
) -> None:
    cases = Cases(seed, kernels)
    for row in covering_rows(AXES, offered, random.Random(seed)):
        check(cases.get(row), row, tmp_path / "run", kernels, PosixDisk())


def test_every_choice_gives_the_bits_of_the_plain_loop(kernels: Kernels, seed: int, long: bool) -> None:
    """With `--long` the whole product of the axes but DRAWN, in memory; else a few plans at random."""
    rng, cases = random.Random(seed), Cases(seed, kernels)
    for row in one_of_each(rng) if long else islice(random_rows(AXES, offered, rng), SAMPLED):
        check(cases.get(row), row, Path("/run"), kernels, RecordingDisk())


def test_two_threads_give_the_bits_of_the_plain_loop(tmp_path: Path, seed: int) -> None:
    row: Row = {name: values[-1] for name, values in AXES.items()} | {
        "gradients": "ram", "update": "on-fetch", "micro_rows": (3, 1), "turns": None, "order": "breadth",
        "rule": "lomo"
    }  # fmt: skip
    torch.set_num_threads(2)
    kernels = load(2)
    case = Cases(seed, kernels, TWO_THREADS_STEPS).get(row)
    check(case, row, tmp_path / "run", kernels, PosixDisk())
    kernels.close()


def test_the_plain_loop_is_sensitive_to_the_numerics(seed: int, kernels: Kernels) -> None:
    """Else equality with it would say little."""
    rng = random.Random(seed)
    rows = covering_rows({name: AXES[name] for name in NUMERICS}, lambda row: True, rng)
    base = {name: values[0] for name, values in AXES.items()}
    cases = Cases(seed, kernels)
    images = [cases.get({**base, **row}).expected.images[-1] for row in rows]
    assert all(a != b for a, b in combinations(images, 2))


@pytest.mark.parametrize("sizes", ((2, 2, 2), (3, 2, 4, 3, 2), (5, 5)))
def test_covering_rows_cover_every_pair_that_is_allowed(sizes: tuple[int, ...], seed: int) -> None:
    axes = {f"axis{index}": tuple(range(size)) for index, size in enumerate(sizes)}

    def rule(row: Row) -> bool:
        return row["axis0"] != row["axis1"]

    rows = covering_rows(axes, rule, random.Random(seed), tries=20)
    assert rows == covering_rows(axes, rule, random.Random(seed), tries=20)
    possible = set().union(*(pairs_of(row) for row in every_row(axes, rule)))
    assert set().union(*(pairs_of(row) for row in rows)) == possible
    assert all(rule(row) for row in rows)
    assert len(rows) <= len(list(product(*axes.values())))
