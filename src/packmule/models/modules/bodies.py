"""Forward, backward and loss of a user's blocks over the engine's buffers.

A block's parameters are views of the engine's weights. Nothing of a forward is kept but the block's
input: backward runs the block again under autograd, within one task, and adds the gradients to the
engine's as soon as each is complete. Random numbers are drawn from a generator that is seeded by
(run's seed, step, micro-batch, block): running a block again, later or elsewhere draws the same.

Letters: B rows of a micro-batch; `c` and `g` the compute and the gradient dtype. `weights` and
`grads` map a block's parameter names to tensors of these.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call
from torch.utils._pytree import tree_map

from packmule.errors import ConfigError
from packmule.models.modules.build import Part, UserModel, call
from packmule.models.modules.samples import Draw, SampleBatch
from packmule.models.views import TORCH_DTYPES
from packmule.shapes.bodies import Dtypes
from packmule.spec.tally import Tally

Tensors = Mapping[str, Tensor]

RESERVED = frozenset({"loss", "targets"})
"""What an evaluation reports by itself."""


@dataclass(frozen=True)
class ModuleBodies:
    """What every body of a run shares, and nothing that changes.

    Attributes:
        seed: of the run.
    """

    model: UserModel
    types: Dtypes
    seed: int

    def batch(self, batch: SampleBatch) -> SampleBatch:
        """The same micro-batch with its floating-point tensors in the compute dtype."""
        dtype = TORCH_DTYPES[self.types.compute]

        def cast(value: Any) -> Any:
            return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value

        return batch._replace(data=tree_map(cast, batch.data))

    def forward(
        self, block: int, weights: Tensors, x: Tensor | None, batch: SampleBatch, draw: Draw | None
    ) -> Tensor:
        """A block's output, c [B, ...]. Without `draw` it is evaluated: no dropout.

        A training forward runs under autograd as the one in backward does, since operators may choose
        other kernels without it, and the two have to agree to the bit.
        """
        part = self.model.parts[block]
        if draw is None:
            out = self._run(block, weights, x, batch, draw)
        else:
            with torch.enable_grad():
                leaves = {name: _leaf(weight) for name, weight in weights.items()}
                out = self._run(block, leaves, None if x is None else _leaf(x), batch, draw)
            out = out.detach() if isinstance(out, Tensor) else out
        if not isinstance(out, Tensor) or out.ndim < 1 or len(out) != batch.rows:
            got = tuple(out.shape) if isinstance(out, Tensor) else type(out).__name__
            raise ConfigError(
                f"`{part.name}` gave {got} for a batch of {batch.rows}.",
                "give one tensor whose first dimension is the batch's",
            )
        if out.dtype != TORCH_DTYPES[self.types.compute]:
            raise ConfigError(
                f"`{part.name}` gave {out.dtype}; this run computes in {self.types.compute}.",
                "keep x's dtype: cast what is computed in another one back, `.to(x.dtype)`",
            )
        return out

    def backward(
        self,
        block: int,
        weights: Tensors,
        x: Tensor | None,
        batch: SampleBatch,
        draw: Draw,
        dy: Tensor,
        grads: Tensors,
        first: bool,
    ) -> Tensor | None:
        """The gradient of the block's input; its parameters' are added to `grads`.

        Args:
            x: the block's input; None for the first block.
            dy: c, the gradient of its output; it may be overwritten afterwards.
            grads: empty: the block is frozen, only the input's gradient is wanted.
            first: this is the first contribution: write, do not add.
        """
        with torch.enable_grad():
            leaf = None if x is None else _leaf(x)
            leaves, missing = _leaves(weights, grads, first)
            out = self._run(block, leaves, leaf, batch, draw)
            if out.requires_grad:
                _Given.apply(out, dy.view(out.shape)).backward()
        _zero(missing, grads, first)
        return None if leaf is None else leaf.grad

    def loss(
        self,
        weights: Tensors,
        x: Tensor,
        batch: SampleBatch,
        draw: Draw,
        scale: float,
        grads: Tensors,
        first: bool,
    ) -> tuple[float, int, Tensor | None]:
        """Sum of the head's losses, their number, and the gradient of x.

        Args:
            scale: factor of the gradient, 1 / (targets of the global batch).
        """
        with torch.enable_grad():
            leaf = _leaf(x)
            leaves, missing = _leaves(weights, grads, first)
            out = self._run(len(self.model.parts) - 1, leaves, leaf, batch, draw)
            losses, _ = self._judged(out, batch)
            total = float(losses.detach().sum(dtype=torch.float64))
            if losses.requires_grad:
                _Given.apply(losses, torch.full_like(losses, scale)).backward()
        _zero(missing, grads, first)
        return total, losses.numel(), leaf.grad

    def evaluate(self, weights: Tensors, x: Tensor, batch: SampleBatch) -> Tally:
        """Sums of the head's losses and of what else it reports, without gradients or dropout."""
        losses, more = self._judged(self._run(len(self.model.parts) - 1, weights, x, batch, None), batch)
        sums = tuple((name, float(value.sum(dtype=torch.float64))) for name, value in sorted(more.items()))
        return Tally(float(losses.sum(dtype=torch.float64)), losses.numel(), correct=None, sums=sums)

    def _judged(self, out: Any, batch: SampleBatch) -> tuple[Tensor, Mapping[str, Tensor]]:
        """A head's output: the losses, and other values per target by name."""
        losses, more = out if isinstance(out, tuple) and len(out) == 2 else (out, {})
        losses = self._losses(losses, batch)
        if not isinstance(more, Mapping):
            raise ConfigError(
                f"`head` gave a {type(more).__name__} beside its losses.",
                "give the losses, or (losses, {name: one value per target})",
            )
        for name, value in more.items():
            numel = value.numel() if isinstance(value, Tensor) else 0
            if not isinstance(name, str) or name in RESERVED or not name.isidentifier():
                raise ConfigError(
                    f"`head` reports {name!r}, which cannot name a metric.", "use a word such as `accuracy`"
                )
            if numel != losses.numel():
                got = f"{numel} values" if isinstance(value, Tensor) else f"a {type(value).__name__}"
                raise ConfigError(
                    f"`head` gave {got} as {name!r} for {losses.numel()} targets.",
                    "give one value per target; their mean is reported",
                )
        return losses, more

    def _losses(self, losses: Any, batch: SampleBatch) -> Tensor:
        if not isinstance(losses, Tensor) or not losses.is_floating_point() or losses.ndim == 0:
            got = f"a {losses.dtype} scalar" if isinstance(losses, Tensor) else type(losses).__name__
            raise ConfigError(
                f"`head` gave {got}: it has to give one loss per target.",
                "compute the loss with reduction='none'; the mean over the whole step is taken for you",
            )
        if losses.numel() != batch.targets:
            raise ConfigError(
                f"`head` gave {losses.numel()} losses for {batch.targets} targets.",
                "give one loss per sample, or let `targets(sample)` say how many a sample has",
            )
        return losses

    def _run(
        self, block: int, weights: Tensors, x: Tensor | None, batch: SampleBatch, draw: Draw | None
    ) -> Any:
        part = self.model.parts[block]
        part.module.train(draw is not None)
        torch.manual_seed(self.draw_seed(block, draw))
        return call(f"`{part.name}`", functional_call, part.module, dict(weights), _inputs(part, x, batch))

    def draw_seed(self, block: int, draw: Draw | None) -> int:
        """What torch's generator is seeded with before a block runs."""
        step, micro = (-1, -1) if draw is None else draw
        words = struct.pack("<4q", self.seed, step, micro, block)
        return int.from_bytes(hashlib.blake2b(words, digest_size=8).digest(), "little", signed=True)


class _Given(torch.autograd.Function):
    """A scalar whose gradient with respect to a tensor is given: what `out.backward(gradient)` does, which
    imports a symbolic algebra package first (M: 48 MB and 2 s in torch 2.13)."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, gradient: Tensor) -> Tensor:
        ctx.given = gradient
        return out.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *scale: Tensor) -> tuple[Tensor, None]:
        return ctx.given, None


def _inputs(part: Part, x: Tensor | None, batch: SampleBatch) -> tuple[Any, ...]:
    if x is None:
        return (batch.data,)
    return (x, batch.data) if part.takes_batch or part.name == "head" else (x,)


def _leaf(tensor: Tensor) -> Tensor:
    """A tensor that autograd sees, in the same memory. It has a version counter of its own: all views of
    the arena share one, and a gradient that is written would seem to change the weights."""
    return tensor.data.requires_grad_()


def _leaves(weights: Tensors, grads: Tensors, first: bool) -> tuple[dict[str, Tensor], set[str]]:
    """Weights that autograd sees, and the names of those whose gradient has not come yet. Without
    `grads` the block is frozen."""
    if not grads:
        return {name: weight.data for name, weight in weights.items()}, set()
    missing = set(weights)
    leaves = {}
    for name, weight in weights.items():
        leaf = _leaf(weight)
        leaf.register_post_accumulate_grad_hook(partial(_take, name, grads[name], first, missing))
        leaves[name] = leaf
    return leaves, missing


def _take(name: str, gradient: Tensor, first: bool, missing: set[str], leaf: Tensor) -> None:
    """Move a gradient that is complete to the engine's buffer, and let go of it."""
    found, leaf.grad = leaf.grad, None
    missing.discard(name)
    if found is None:
        return
    if first:
        gradient.copy_(found)
    else:
        gradient.add_(found)


def _zero(missing: set[str], grads: Tensors, first: bool) -> None:
    """Parameters that the forward did not use have a gradient too."""
    if first:
        for name in missing:
            grads[name].zero_()
