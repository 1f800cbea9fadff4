"""search: the fastest plan that fits, or why there is none and what would help."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, combinations
from math import inf
from typing import NamedTuple

from packmule.errors import DoesNotFit
from packmule.graph.model import PlannedModel
from packmule.plan.bounds import Sizes, device_bound, ram_bound, seconds_bound
from packmule.plan.candidates import CHUNK_BYTES, MOST_READ_AHEAD, candidates, streams, why_uncut
from packmule.plan.changes import Changes, changes_of
from packmule.plan.predict import STAGING_BYTES, baseline, batch_bytes, predict, step_only
from packmule.plan.sharing import balanced_share, climb, may_share, numbered
from packmule.plan.situation import Situation
from packmule.shapes.model import ModelShape
from packmule.spec.plan import Io, Plan
from packmule.spec.units import format_bytes, format_seconds

SIMULATIONS = 16
"""Candidates simulated once one fits; bounds order them, so the best is nearly always among them."""

SHOWN = 3
"""Plans that are worked out in full: the fastest and its runners-up."""

FEW = 4
"""Candidates simulated for each change that a refusal tries."""

WAYS = 3
"""Ways out that a refusal names at most."""

WORTH_SAVING = 0.02
"""Part of the memory a job needs above the baseline that a change must save to be named with a smaller
`--ram`."""

NEAR = 1.02
"""A plan this near to its bound is not cut otherwise: no cut could gain more."""

WORTH_CUTTING = 1.25
"""Nor is one that takes so much longer than the fastest."""

READ_AHEADS = (2, 4, 8, 16, 32)
"""Chunks of a stream that the search reads ahead."""

LONG_CHUNKS = (16 << 20, 64 << 20)
"""Bytes of a chunk where the disk turns slowly from reading to writing: it moves more between two turns."""

SLOW_TURNAROUND = 0.1
"""A turn is slow that takes this share of moving a chunk."""

LEAN = 8
"""Candidates of the least bound that are worked out to find the least that is really needed."""

UNBOUNDED = 1 << 50
"""A budget that is none."""

COMMIT_SHARE = 0.03
"""Writing resident state takes this share of a run's time where the planner chooses how often: it is in the
background, but the disk's life is not for nothing."""


@dataclass(frozen=True)
class Found:
    """A search's result.

    Attributes:
        plan: the fastest that fits.
        runners_up: some of the others that fit.
        possible, bounded, simulated: candidates in all, ruled out by bounds, looked at closely.
        unbounded: the fastest plan if memory were no matter, or None if it is `plan`.
    """

    plan: Plan
    runners_up: tuple[Plan, ...]
    possible: int
    bounded: int
    simulated: int
    unbounded: Plan | None = None


def search(situation: Situation) -> Found:
    """The fastest plan whose every phase fits the budget.

    Raises:
        DoesNotFit: says how much is missing and names changes that would fit, with their cost.
    """
    found = _search(situation)
    if found is None:
        raise _refusal(situation)
    free = None if situation.fixed else _search(replace(situation, budget_bytes=UNBOUNDED), simulations=1)
    if free is None or free.plan.model_copy(update={"budget_bytes": found.plan.budget_bytes}) == found.plan:
        return found
    return replace(found, unbounded=free.plan)


def _search(situation: Situation, simulations: int = SIMULATIONS, known: Plan | None = None) -> Found | None:
    """Look closely at the most promising candidates; complete the fastest whose phases all fit.

    Args:
        known: a candidate that fits. Where few do, those that only seem to would all be simulated to find it.
    """
    room = situation.budget_bytes - baseline(situation) - STAGING_BYTES
    possible = 0
    order: list[_Ranked] = []
    for plan in candidates(situation):
        possible += 1
        if ram_bound(situation.shape, plan) + batch_bytes(situation.shape, plan) > room:
            continue
        if situation.device is not None:
            room_there = situation.device_bytes - situation.device.context_bytes
            if device_bound(situation.shape, plan) > room_there:
                continue
        busy = seconds_bound(situation.shape, plan, situation.costs, situation.mean_length)
        order.append(_Ranked(busy.estimate, len(order), max(busy), plan))
    order.sort(key=lambda item: item[:2])
    if known is not None:
        known = known.model_copy(update={"budget_bytes": situation.budget_bytes})
        order.sort(key=lambda item: item.plan != known)
    complete: list[Plan] = []
    simulated = 0
    # A step that fits may have a phase beside it that does not: then the next candidates are looked at.
    while not complete and simulated < len(order):
        fitting, simulated = _closely(situation, order, simulated, simulations)
        for _, _, plan in sorted(fitting, key=lambda item: item[:2]):
            whole = _complete(situation, plan)
            if whole is not None and whole not in complete:
                complete.append(whole)
            if len(complete) == SHOWN:
                break
    if not complete:
        return None
    return Found(complete[0], tuple(complete[1:]), possible, possible - len(order), simulated)


class _Ranked(NamedTuple):
    """A candidate with the seconds its step may take, and can not do without."""

    estimate: float
    number: int
    bound: float
    plan: Plan


def _closely(
    situation: Situation, order: Sequence[_Ranked], start: int, simulations: int
) -> tuple[list[tuple[float, int, Plan]], int]:
    """Simulate some candidates, and cut the streams of the fastest otherwise.

    Args:
        start: the first of `order` to look at.

    Returns:
        (those that fit: seconds of a step, number, plan; where to go on)
    """
    fitting: list[tuple[float, int, Plan]] = []

    def fits(plan: Plan, number: int) -> bool:
        numbered_plan = numbered(situation, plan)
        if numbered_plan is None:
            return False
        plan = numbered_plan
        step = step_only(situation, plan)
        if step.ram > situation.budget_bytes or step.device > situation.device_bytes:
            return False
        fitting.append((_with_commits(situation, plan, step.seconds), number, plan))
        return True

    def best() -> tuple[float, int, Plan]:
        return min(fitting, key=lambda item: item[:2])

    def share_updates() -> None:
        """Have the device update some chunks, of the fastest of each update mode that come near the best."""
        for mode in sorted({plan.update for _, _, plan in fitting}):
            known, number, plan = min((i for i in fitting if i[2].update == mode), key=lambda item: item[:2])
            if known > WORTH_CUTTING * best()[0] or not may_share(situation, plan, known):
                continue

            def seconds(share: int) -> float:
                if share == plan.device_updates:  # noqa: B023
                    return known  # noqa: B023
                variant = plan.model_copy(update={"device_updates": share})  # noqa: B023
                return fitting[-1][0] if fits(variant, number) else inf  # noqa: B023

            climb(seconds, plan.device_updates or balanced_share(situation.shape, plan, situation))

    simulated, at = 0, start
    while at < len(order) and not (simulated >= simulations and fitting):
        _, number, bound, plan = order[at]
        at += 1
        if fitting and bound >= best()[0]:
            continue
        fits(plan, number)
        simulated += 1
    # Updates that are made ahead have more to gain from the cut.
    for speculating in (False, True):
        some = [item for item in fitting if item[2].speculate == speculating]
        if not some:
            continue
        seconds, number, plan = min(some, key=lambda item: item[:2])
        bound = next(item.bound for item in order if item.number == number)
        if seconds > WORTH_CUTTING * best()[0]:
            continue
        for rising in _cuts(situation, plan):
            if best()[0] <= NEAR * bound:
                break
            for variant in rising:
                if variant != plan and not fits(variant, number):
                    break  # those that follow need more
    if fitting and situation.device is not None:
        share_updates()
        _, number, plan = best()
        for variant in _staying(situation, plan):
            if fits(variant, number):
                break
    if fitting:
        _, number, _ = best()
        for variant in _keeping(situation, best()[2]):
            if fits(variant, number):
                break
    if fitting and situation.device is not None:
        share_updates()  # what stays is not sent, what is kept is not read
    return fitting, at


def _cuts(situation: Situation, plan: Plan) -> list[list[Plan]]:
    """The same plan with its streams cut otherwise. More and more chunks read ahead: what the disk can fetch
    while the cores are at one task is applied at once when that task ends. Longer and longer ones, where
    the disk loses time as it turns from reading to writing."""
    if not streams(plan.placement):
        return []
    io = plan.io
    reads = [count for count in READ_AHEADS if count * io.chunk_bytes <= MOST_READ_AHEAD]
    rising = [[Io(prefetch=max(1, io.prefetch), chunk_bytes=io.chunk_bytes, read_ahead=n) for n in reads]]
    rising += [[io.model_copy(update={"prefetch": depth})] for depth in (0, 2)]
    if io.chunk_bytes < max(CHUNK_BYTES):
        rising.append([io.model_copy(update={"chunk_bytes": max(CHUNK_BYTES)})])
    if situation.costs.turnaround_seconds * situation.costs.read_bytes > SLOW_TURNAROUND * io.chunk_bytes:
        rising.append([io.model_copy(update={"chunk_bytes": size, "read_ahead": 2}) for size in LONG_CHUNKS])
    return [[plan.model_copy(update={"io": io}) for io in ios] for ios in rising]


def _staying(situation: Situation, plan: Plan) -> Iterator[Plan]:
    """The same plan with weights of blocks on the device as far as its memory goes, less and less of it."""
    if situation.device is None:
        return
    sizes, order = Sizes.of(situation.shape, plan.numerics), PlannedModel(situation.shape, plan).outermost
    spare = situation.device_bytes - step_only(situation, plan).device
    for share in (1.0, 0.9, 0.7, 0.5, 0.25):
        held = accumulate(sizes.weights[block] for block in order)
        count = sum(size <= share * spare for size in held)
        if count:
            kept = plan.placement.model_copy(update={"device_weights": count})
            yield plan.model_copy(update={"placement": kept})


def _keeping(situation: Situation, plan: Plan) -> Iterator[Plan]:
    """The same plan with blocks kept in the RAM it leaves, less and less of it: weights first, which are read
    twice a step."""
    place, shape = plan.placement, situation.shape
    if place.state == "ram":
        return
    sizes, order = Sizes.of(shape, plan.numerics), PlannedModel(shape, plan).outermost
    spare = situation.budget_bytes - step_only(situation, plan).ram

    def count(table: Sequence[int], room: float) -> int:
        held = accumulate(table[block] for block in order)
        return sum(size <= room for size in held)

    for share in (0.95, 0.8, 0.6):
        weights = 0 if place.weights == "ram" else count(sizes.weights, share * spare)
        left = share * spare - sum(sizes.weights[block] for block in order[:weights])
        # What was updated ahead is taken back by reading it again.
        state = 0 if plan.speculate else count(sizes.state, left)
        if weights or state:
            kept = place.model_copy(update={"kept_weights": weights, "kept_state": state})
            yield plan.model_copy(update={"placement": kept})


def _complete(situation: Situation, plan: Plan) -> Plan | None:
    """The plan with commit interval and predictions, or None if another phase does not fit."""
    steps = _commit_steps(situation, plan)
    plan = plan.model_copy(update={"checkpoint": plan.checkpoint.model_copy(update={"commit_steps": steps})})
    predicted = predict(situation, plan)
    if predicted.peak_ram_bytes > situation.budget_bytes:
        return None
    if predicted.peak_device_bytes > situation.device_bytes:
        return None
    return plan.model_copy(update={"predicted": predicted})


def _commit_steps(situation: Situation, plan: Plan) -> int:
    """How often state in RAM is written: so rarely that it takes COMMIT_SHARE of the time."""
    if not situation.commit_auto:
        return plan.checkpoint.commit_steps
    if plan.placement.state == "disk":
        return 1
    cost = situation.costs.write(_state_bytes(situation, plan))
    bound = seconds_bound(situation.shape, plan, situation.costs, situation.mean_length)
    return min(max(1, round(cost / (COMMIT_SHARE * max(bound)))), max(1, situation.total_steps))


def _with_commits(situation: Situation, plan: Plan, seconds: float) -> float:
    """Mean seconds of a step: where resident state is written, it lasts at least as long as that takes."""
    if plan.placement.state == "disk":
        return seconds
    cost = situation.costs.write(_state_bytes(situation, plan))
    return seconds + max(0.0, cost - seconds) / _commit_steps(situation, plan)


def _state_bytes(situation: Situation, plan: Plan) -> int:
    return sum(Sizes.of(situation.shape, plan.numerics).state)


def _by_bound(situation: Situation) -> list[tuple[int, int, Plan]]:
    """(bytes that it needs at least, index, plan) of every candidate, the least first."""
    bounds = (
        (ram_bound(situation.shape, plan) + batch_bytes(situation.shape, plan), index, plan)
        for index, plan in enumerate(candidates(situation))
    )
    return sorted(bounds, key=lambda item: item[:2])


def leanest(situation: Situation) -> tuple[Plan, int]:
    """The plan with the least memory, by bounds, and what it really needs.

    Returns:
        (plan, bytes of the process tree)
    """
    ranked = _by_bound(situation)
    # A step is one of the phases, and much sooner worked out than all of them.
    steps = sorted((step_only(situation, plan).ram, index, plan) for _, index, plan in ranked[:LEAN])
    best: tuple[Plan, int] | None = None
    for ram, _, plan in steps:
        if best is not None and ram >= best[1]:
            break
        predicted = predict(situation, plan)
        if best is None or predicted.peak_ram_bytes < best[1]:
            best = plan, predicted.peak_ram_bytes
    if best is None:
        raise DoesNotFit(
            "No plan has the placements and options asked for.",
            "see the table of combinations in docs/design.md, or leave some of them `auto`",
        )
    return best


def _refusal(situation: Situation) -> DoesNotFit:
    """How much is missing, and up to three changes that would fit: more memory, then others."""
    if situation.device is not None:
        there = _search(replace(situation, device_bytes=UNBOUNDED), FEW)
        if there is not None:
            return _device_refusal(situation, there)
    lean, needed = leanest(situation)
    smaller = None if situation.fixed else situation.smaller()
    ways = []
    roomy = _search(replace(situation, budget_bytes=_rounded(needed)), FEW, lean)
    if roomy is not None:
        ways.append(_way(f"--ram {_typed(_rounded(needed))}", roomy))
    changes = changes_of(situation, smaller)
    # Mild changes first, then two of them together.
    for names in [*combinations(changes, 1), *combinations(changes, 2)]:
        if len(ways) == WAYS:
            break
        if any(name.split()[0] in " ".join(ways[1:]) for name in names):
            continue  # a stronger form of a way already named
        found = _search(_changed(situation, changes, names), FEW)
        if found is not None:
            ways.append(_way(" ".join(names), found))
    ways += _partial_ways(situation, changes, needed)[: WAYS - len(ways)]
    shape = situation.shape
    if smaller is not None and isinstance(shape, ModelShape) and any(smaller.flag in way for way in ways):
        kept = f"{smaller.tokens:,} of {shape.vocab:,} tokens"
        ways[-1] += f". The model of `{smaller.flag}` has {kept}; make it with `{smaller.command}`"
    budget = situation.budget_bytes
    uncut = why_uncut(shape, situation.numerics)
    return DoesNotFit(
        f"The job needs at least {format_bytes(needed)} of RAM, {format_bytes(needed - budget)} more "
        f"than the budget of {format_bytes(budget)} "
        f"(of which Python and torch take {format_bytes(baseline(situation))})."
        + ("" if uncut is None else f" {uncut}"),
        "these would fit: " + "; ".join(ways),
    )


def _device_refusal(situation: Situation, there: Found) -> DoesNotFit:
    """It is the device's memory that does not suffice."""
    device, have = situation.device, situation.device_bytes
    assert device is not None
    bounds = sorted(
        (device_bound(situation.shape, plan), index, plan)
        for index, plan in enumerate(candidates(replace(situation, device_bytes=UNBOUNDED)))
    )
    needed = min(step_only(situation, plan).device for _, _, plan in bounds[:LEAN])
    ways = []
    roomy = _search(replace(situation, device_bytes=_rounded(needed)), FEW) or there
    enough = max(needed, 0 if roomy.plan.predicted is None else roomy.plan.predicted.peak_device_bytes)
    ways.append(_way(f"--device-memory {_typed(_rounded(enough))}", roomy))
    if not situation.fixed:
        cpu = _search(replace(situation, device=None, device_bytes=0), FEW)
        ways += [] if cpu is None else [_way("--device cpu", cpu)]
    return DoesNotFit(
        f"The job needs at least {format_bytes(needed)} of the memory of `{device.name}`, "
        f"{format_bytes(max(0, needed - have))} more than the {format_bytes(have)} it may use "
        f"(of which torch takes {format_bytes(device.context_bytes)}).",
        "these would fit: " + "; ".join(ways),
    )


def _changed(situation: Situation, changes: Changes, names: Sequence[str]) -> Situation:
    for name in names:
        situation = changes[name](situation)
    return situation


def _partial_ways(situation: Situation, changes: Changes, needed: int) -> list[str]:
    """Changes that do not suffice but leave less memory to find: the one that saves most, and the
    pair with it that saves most."""
    ways: list[str] = []
    chosen: tuple[str, ...] = ()
    for _ in range(2):
        bounds = {
            (*chosen, name): _by_bound(_changed(situation, changes, (*chosen, name)))[:1]
            for name in changes
            if all(name.split()[0] != other.split()[0] for other in chosen)
        }
        # Bounds choose, since working every change out would take longer than a user waits.
        offered = {names: ranked[0][0] for names, ranked in bounds.items() if ranked}
        if not offered:
            break
        chosen = min(offered, key=lambda names: offered[names])
        changed = _changed(situation, changes, chosen)
        lean, least = leanest(changed)
        if least > needed - WORTH_SAVING * max(0, needed - baseline(situation)):
            break
        needed = least
        found = _search(replace(changed, budget_bytes=_rounded(least)), FEW, lean)
        if found is not None:
            ways.append(_way(f"{' '.join(chosen)} --ram {_typed(_rounded(least))}", found))
    return ways


def _typed(size: int) -> str:
    return format_bytes(size).replace(" ", "")


def _way(name: str, found: Found) -> str:
    predicted = found.plan.predicted
    return name if predicted is None else f"{name} ({format_seconds(predicted.step_seconds)} per step)"


def _rounded(size: int) -> int:
    """Up to the next 10 MB, so that the figure can be typed."""
    return -(-size // 10_000_000) * 10_000_000
