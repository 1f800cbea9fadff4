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
        sums: (name, sum) of what else such a head reports, by name.
    """

    loss: float = 0.0
    targets: int = 0
    correct: int | None = 0
    byte_loss: float = 0.0
    bytes: int = 0
    sums: tuple[tuple[str, float], ...] = ()

    def __add__(self, other: Tally) -> Tally:
        known = self.correct is not None and other.correct is not None
        return Tally(
            self.loss + other.loss,
            self.targets + other.targets,
            (self.correct or 0) + (other.correct or 0) if known else None,
            self.byte_loss + other.byte_loss,
            self.bytes + other.bytes,
            self._summed(other),
        )

    def _summed(self, other: Tally) -> tuple[tuple[str, float], ...]:
        """Names that both know, or the one that has targets."""
        if not self.targets or not other.targets:
            return self.sums if self.targets else other.sums
        more = dict(other.sums)
        return tuple((name, value + more[name]) for name, value in self.sums if name in more)

    def metrics(self) -> dict[str, float]:
        """By name, per target: loss; of text perplexity, accuracy, and bits_per_byte where it is known;
        else what the model's head reports."""
        targets = max(1, self.targets)
        loss = self.loss / targets
        found = {"loss": loss}
        if self.correct is not None:
            found |= {"perplexity": math.exp(min(loss, 700.0)), "accuracy": self.correct / targets}
        found |= {name: value / targets for name, value in self.sums}
        if self.bytes:
            found["bits_per_byte"] = self.byte_loss / math.log(2.0) / self.bytes
        return found
