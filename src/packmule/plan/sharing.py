"""How many chunks of the state a device updates: where the search looks, and what a run on a GPU has to keep.

(Deep Optimizer States: Maurya et al. 2024, arXiv:2410.21316, who have the GPU update every k-th of a step's
subgroups and balance k by the rates of link, GPU and CPU.)
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from packmule.graph.model import PlannedModel
from packmule.plan.bounds import seconds_bound
from packmule.plan.situation import Situation
from packmule.shapes.layout import ITEMSIZE
from packmule.shapes.module import Shape
from packmule.spec.plan import Plan, SharedUpdates

WORTH_SHARING = 1.02
"""A step this near to what no split of the updates can shorten is left as it is."""

AROUND = 9
"""Of a hundred chunks, how many lie between the shares that the search looks at first."""

STRIDES = (4, 2, 1)
"""And those by which it moves then."""


def balanced_share(shape: Shape, plan: Plan, situation: Situation) -> int:
    """Of a hundred chunks, how many the device updates while the cores update the others, where nothing else
    takes time. 0: there is no device, or it cannot help.

    With a share f, the cores take (1 - f) u per chunk. A direction of the link takes f t for what the device
    updates, and (1 - f) w for the weights or gradients of the others; the device itself f t. The slowest of
    them is as fast as the cores where f / (1 - f) = (u - w) / t. The stride of the paper is k = 1 / f.
    """
    model, costs = PlannedModel(shape, plan), situation.costs
    if costs.device is None or model.whole_updates:
        return 0
    size, planes, place = plan.io.chunk_bytes, len(model.planes), plan.placement
    weights = size // ITEMSIZE[model.types.master] * ITEMSIZE[model.types.compute]
    complete, follows = plan.update == "on-backward", plan.update == "on-fetch"
    here = costs.compute(moved=size * (2 * planes + 1.5 + (planes if place.state == "disk" else 0)))
    send, receive = costs.device.send, costs.device.receive
    kept = receive(weights) if place.weights != "state" else 0.0
    there = (
        (
            send(weights) if follows or place.device_weights else 0.0,
            send(size * planes) + (0.0 if complete else send(size)),
        ),
        (receive(size) if complete else 0.0, receive(size * planes) + kept),
        (0.0, costs.device.update(size * (2 * planes + 1.5))),
    )
    return min(round(100 * max(0.0, here - w) / (max(0.0, here - w) + t)) for w, t in there)


def may_share(situation: Situation, plan: Plan, seconds: float) -> bool:
    """Whether a device could make a plan's step of so many seconds shorter by updates: not one that lasts as
    long as device, link or disk are busy with what is theirs anyway."""
    if not balanced_share(situation.shape, plan, situation):
        return False
    alone = plan.model_copy(update={"device_updates": 0})
    busy = seconds_bound(situation.shape, alone, situation.costs, situation.mean_length)
    return seconds > WORTH_SHARING * max(busy.device, busy.disk, busy.link)


def climb(seconds: Callable[[int], float], start: int) -> int:
    """The share with the shortest step that is found by a look at every ninth, `start` among them, and a walk
    from the best of these in ever shorter strides. How chunks fall on blocks makes many small valleys.

    Args:
        seconds: of a step with a share; infinite where it does not fit.
    """
    at = cache(seconds)
    best = min((0, *(share for share in range(start % AROUND, 100, AROUND)), 100), key=at)
    for stride in STRIDES:
        moved = True
        while moved:
            near = min((share for share in (best - stride, best + stride) if 0 <= share <= 100), key=at)
            moved = at(near) < at(best)
            best = near if moved else best
    return best


def numbered(situation: Situation, plan: Plan) -> Plan | None:
    """The plan with the split of its updates in its numerics, where it fixes bits: on a GPU. None where these
    are fixed to another one."""
    split = None
    if plan.numerics.device is not None and plan.device_updates:
        split = SharedUpdates(percent=plan.device_updates, chunk_bytes=plan.io.chunk_bytes)
    if plan.numerics.shared_updates == split:
        return plan
    if situation.fixed:
        return None
    numerics = plan.numerics.model_copy(update={"shared_updates": split})
    return plan.model_copy(update={"numerics": numerics})
