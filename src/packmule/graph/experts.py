"""The tasks of layers with experts, in each direction, and the buffers that a layer's blocks share.

The layer's first block (attention and router) writes ROUTED and MIXED; each group of experts adds
to MIXED, and the last group rounds it into the next block's INPUT. Backward runs the groups from the
last: each adds to DISPATCHED, which the first block turns into the gradient of its input.
"""

from __future__ import annotations

from packmule.graph.emit import Emitter
from packmule.graph.kinds import BufferKind, TaskKind
from packmule.shapes import bodies, experts
from packmule.shapes.experts import Experts
from packmule.shapes.layout import PAGE, TensorSpec, layout, round_up

Key = tuple[int, int]
"""(a layer's first block, micro-batch)."""


class ExpertTasks:
    """Adds them to an emitter."""

    def __init__(self, emitter: Emitter) -> None:
        self.emitter = emitter
        self.model = emitter.model
        self.routed: dict[Key, int] = {}
        self._mixed: dict[Key, int] = {}
        self._dispatched: dict[Key, int] = {}
        self._saved: dict[Key, int] = {}
        self._balance = -1

    def routed_bytes(self, block: int, tokens: int) -> int:
        """Bytes of ROUTED, whole pages."""
        specs = experts.routed(self._experts(block), self.model.decoder.hidden, tokens, self.model.types)
        return round_up(layout(specs).bytes, PAGE)

    def balance(self, block: int) -> int:
        """The step's BALANCE buffer, where the layer's experts are to be balanced; else -1."""
        own, plan = self._experts(block), self.model.plan
        if own.balance and plan.order == "depth":
            raise ValueError("a depth-first step cannot balance experts: it learns their load too late")
        if own.balance and self._balance < 0:
            self._balance = self.emitter.work(BufferKind.BALANCE, experts.balance_spec(own).bytes)
        return self._balance if own.balance else -1

    def opened(self, block: int, micro: int, tokens: int) -> list[int]:
        """ROUTED and MIXED, which a layer's first block is about to write."""
        key, emitter = (block, micro), self.emitter
        specs = experts.mixed(self.model.decoder.hidden, tokens, self.model.types)
        size = self.routed_bytes(block, tokens)
        self.routed[key] = emitter.work(BufferKind.ROUTED, size, block, micro)
        self._mixed[key] = self._work(BufferKind.MIXED, specs, block, micro)
        return [self.routed[key], self._mixed[key]]

    def closed(self, block: int, micro: int) -> list[int]:
        """ROUTED and DISPATCHED, which a layer's first block reads in its backward."""
        key = (block, micro)
        return [self.routed[key], self._dispatched.pop(key)]

    def forward(
        self,
        block: int,
        micro: int,
        tokens: int,
        weights: list[int],
        out: int,
        keep: bool,
        seconds: float = 0.0,
    ) -> None:
        """One group of experts.

        Args:
            out: INPUT of the next layer; written by the last group.
            keep: gate and up are kept for the backward.
            seconds: more than the arithmetic takes.
        """
        model, key = self.model, (self.model.opening(block), micro)
        own, hidden = self._experts(block), self.model.decoder.hidden
        writes = [self._mixed[key]]
        reads = [*weights, self.routed[key], self._mixed[key]]
        if keep:
            if key not in self._saved:
                specs = experts.experts_saved(own, tokens, model.types)
                self._saved[key] = self._work(BufferKind.SAVED, specs, key[0] + 1, micro)
            else:
                reads.append(self._saved[key])
            writes.append(self._saved[key])
        if model.closes(block):
            writes.append(out)
            del self._mixed[key]
        specs = bodies.experts_scratch(own, hidden, tokens, model.types, False, keep)
        self.emitter.task(
            TaskKind.EXPERTS_FORWARD,
            self.emitter.experts_seconds(block, tokens) + seconds,
            reads,
            [*writes, self.emitter.scratch(specs, block, micro)],
            block,
            micro,
            workspace=bodies.KERNEL_WORKSPACE,
            near=True,
        )

    def backward(
        self,
        block: int,
        micro: int,
        tokens: int,
        weights: list[int],
        dy: int,
        gradients: list[int],
        recompute: bool,
    ) -> None:
        """One group of experts; gate and up are computed again where `recompute`.

        Args:
            gradients: the buffer of the weights' gradients; none where they are frozen.
        """
        model, key = self.model, (self.model.opening(block), micro)
        own, hidden = self._experts(block), self.model.decoder.hidden
        reads = [*weights, self.routed[key], dy]
        if key in self._dispatched:
            reads.append(self._dispatched[key])
        else:
            specs = experts.dispatched(own, hidden, tokens, model.types)
            self._dispatched[key] = self._work(BufferKind.DISPATCHED, specs, key[0], micro)
        writes = [self._dispatched[key], *gradients]
        if not recompute:
            saved = self._saved[key]
            reads.append(saved)
            writes.append(saved)
            if block == key[0] + 1:
                del self._saved[key]
        scratch = bodies.experts_scratch(own, hidden, tokens, model.types, True, not recompute)
        self.emitter.task(
            TaskKind.EXPERTS_BACKWARD,
            self.emitter.experts_seconds(block, tokens, (2.7 if recompute else 2.0) - (not gradients)),
            reads,
            [*writes, self.emitter.scratch(scratch, block, micro)],
            block,
            micro,
            workspace=bodies.KERNEL_WORKSPACE,
            near=True,
        )

    def _work(self, kind: BufferKind, specs: tuple[TensorSpec, ...], block: int, micro: int) -> int:
        return self.emitter.work(kind, layout(specs).bytes, block, micro)

    def _experts(self, block: int) -> Experts:
        found = self.model.works.experts(block)
        if found is None:
            raise ValueError(f"block {block} belongs to a layer without experts")
        return found
