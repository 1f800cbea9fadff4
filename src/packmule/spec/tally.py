"""Tally: what an evaluation adds up over targets. A sum per metric is all that is ever held."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Tally:
    """Sums over targets. Adding two is all there is to evaluating more text.

    Attributes:
        loss: of all targets, in nats.
        targets: how many.
        correct: targets whose logit is the highest (the first of equal ones); None for a model whose
            head gives losses only.
        byte_loss: of the targets that stand for text, in nats.
        bytes: UTF-8 bytes of these; 0 where the tokenizer does not say.
    """

    loss: float = 0.0
    targets: int = 0
    correct: int | None = 0
    byte_loss: float = 0.0
    bytes: int = 0

    def __add__(self, other: Tally) -> Tally:
        known = self.correct is not None and other.correct is not None
        return Tally(
            self.loss + other.loss,
            self.targets + other.targets,
            (self.correct or 0) + (other.correct or 0) if known else None,
            self.byte_loss + other.byte_loss,
            self.bytes + other.bytes,
        )

    def metrics(self) -> dict[str, float]:
        """By name: loss and perplexity per target; accuracy and bits_per_byte where they are known."""
        targets = max(1, self.targets)
        loss = self.loss / targets
        found = {"loss": loss, "perplexity": math.exp(min(loss, 700.0))}
        if self.correct is not None:
            found["accuracy"] = self.correct / targets
        if self.bytes:
            found["bits_per_byte"] = self.byte_loss / math.log(2.0) / self.bytes
        return found
