"""Flags that change a job and save memory: what a refusal may propose."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from packmule.plan.candidates import why_uncut
from packmule.plan.situation import Situation, Smaller
from packmule.shapes.model import ModelShape
from packmule.shapes.module import ModuleShape

SHORTEST = 32
"""Rows are not proposed to be shorter than this."""

Changes = dict[str, Callable[[Situation], Situation]]
"""Flags, and what they do to a situation."""


def changes_of(situation: Situation, smaller: Smaller | None) -> Changes:
    """Flags that change a job and save memory, mildest first; none when a run is resumed.

    Args:
        smaller: a model that may be trained instead.
    """
    if situation.fixed:
        return {}
    numerics, wishes = situation.numerics, situation.wishes
    free = type(wishes)(ram=wishes.ram, disk_path=wishes.disk_path, threads=wishes.threads)
    found: Changes = {}
    if free != wishes:
        found[
            "--hardware.state auto --hardware.weights auto --hardware.gradients auto --hardware.inputs auto"
        ] = lambda s: replace(s, wishes=free)
    if situation.recompute is False:
        found["--recompute auto"] = lambda s: replace(s, recompute=None)
    if situation.micro_rows is not None:
        found["--micro-batch-size auto"] = lambda s: replace(s, micro_rows=None)
    if situation.update is not None:
        found["--update auto"] = lambda s: replace(s, update=None)
    if numerics.clip is not None:
        found["--max-grad-norm 0"] = lambda s: replace(
            s, numerics=s.numerics.model_copy(update={"clip": None})
        )
    if numerics.precision == "fp32" and not isinstance(situation.shape, ModuleShape):
        narrow = {"precision": "bf16-mixed", "products": situation.hardware.wider_product("bf16-mixed")}
        found["--precision bf16-mixed"] = lambda s: replace(s, numerics=s.numerics.model_copy(update=narrow))
    # What keeps a large vocabulary whole.
    uncut = why_uncut(situation.shape, numerics) is not None
    if uncut and numerics.turns is not None:
        found["--block-schedule all"] = lambda s: replace(
            s, numerics=s.numerics.model_copy(update={"turns": None})
        )
    elif uncut:
        adamw = numerics.optimizer.model_copy(update={"rule": "adamw"})
        found["--optim adamw"] = lambda s: replace(
            s, numerics=s.numerics.model_copy(update={"optimizer": adamw})
        )
    for divisor in (2, 4, 8):
        length = numerics.max_seq_length // divisor
        if length >= SHORTEST:
            found[f"--max-seq-length {length}"] = lambda s, n=length, d=divisor: replace(  # type: ignore[misc]
                s,
                numerics=s.numerics.model_copy(update={"max_seq_length": n}),
                mean_length=s.mean_length / d,
            )
    shape = situation.shape
    if smaller is not None and isinstance(shape, ModelShape) and smaller.tokens < shape.vocab:
        cut = replace(shape, vocab=smaller.tokens)
        found[smaller.flag] = lambda s: replace(s, shape=cut)
    return found
