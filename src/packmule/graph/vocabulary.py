"""The tasks of a head whose matrix is cut into parts, and the buffers that they share.

PART_SCORE of each part adds to SCORES; then PART_GRADIENT of each part, in reverse order, adds to
GATHERED, which HEAD_CLOSE turns into the gradient of the head's input. HEAD_TALLY ends an evaluation.
"""

from __future__ import annotations

from packmule.graph.emit import Emitter
from packmule.graph.kinds import BufferKind, TaskKind
from packmule.shapes import vocabulary
from packmule.shapes.layout import layout


class VocabularyTasks:
    """Adds them to an emitter; each micro-batch has buffers of its own."""

    def __init__(self, emitter: Emitter) -> None:
        self.emitter = emitter
        self.model = emitter.model
        self.head = len(emitter.model.blocks) - 1
        self._scores: dict[int, int] = {}
        self._gathered: dict[int, int] = {}

    def score(self, part: int, micro: int, tokens: int, reads: list[int]) -> None:
        """The head's first visit to a part.

        Args:
            reads: weights of the part and of the head's norm, and the head's input.
        """
        emitter, reads = self.emitter, list(reads)
        if part == self.model.head_parts[0]:
            size = layout(vocabulary.scores(tokens, self.model.types)).bytes
            self._scores[micro] = emitter.work(BufferKind.SCORES, size, micro=micro)
        else:
            reads.append(self._scores[micro])
        emitter.compute(TaskKind.PART_SCORE, tokens, reads, [self._scores[micro]], part, micro)

    def gradient(
        self, part: int, micro: int, tokens: int, reads: list[int], gradient: int, again: bool
    ) -> None:
        """The second one; parts come in reverse order.

        Args:
            gradient: the part's.
            again: it belongs to the second backward of a step that has two.
        """
        emitter, reads = self.emitter, [*reads, self._scores[micro]]
        if part == self.model.head_parts[-1]:
            size = layout(vocabulary.gathered(self.model.decoder.hidden, tokens, self.model.types)).bytes
            self._gathered[micro] = emitter.work(BufferKind.GATHERED, size, micro=micro)
        else:
            reads.append(self._gathered[micro])
        writes = [self._gathered[micro], gradient]
        emitter.compute(TaskKind.PART_GRADIENT, tokens, reads, writes, part, micro, again=again)

    def close(self, micro: int, tokens: int, reads: list[int], dy: int, gradient: int, again: bool) -> None:
        """The loss, and the final norm's backward.

        Args:
            reads: the norm's weights and the head's input.
            dy: written.
            gradient: the norm's.
            again: as in `gradient`.
        """
        reads, writes = [*reads, self._scores[micro], self._gathered[micro]], [dy, gradient]
        self.emitter.compute(TaskKind.HEAD_CLOSE, tokens, reads, writes, self.head, micro, again=again)

    def tally(self, micro: int, tokens: int) -> None:
        """The sums of an evaluation."""
        self.emitter.compute(TaskKind.HEAD_TALLY, tokens, [self._scores[micro]], [], self.head, micro)
