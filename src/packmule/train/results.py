"""What commands and calls give back, as records that print well. No torch."""

from __future__ import annotations

from pydantic import Field

from packmule.spec.records import Record


class Evaluation(Record):
    """The loss of a run's model on text.

    Attributes:
        step: the commit that was judged.
        rows: how many were judged on.
        loss: mean over the targets, in nats.
        perplexity: its exponential; None where samples are no text.
        targets: tokens that carried loss, or losses of samples.
        accuracy: share of them whose logit was the highest; None where it is not known.
        bits_per_byte: loss per UTF-8 byte of text, in bits; None where the tokenizer does not say.
        metrics: what else the head of one's own modules reports, by name.
    """

    step: int
    rows: int
    loss: float
    perplexity: float | None = None
    targets: int
    accuracy: float | None = None
    bits_per_byte: float | None = None
    metrics: dict[str, float] = Field(default={})

    def __str__(self) -> str:
        if self.perplexity is None:
            more = {} if self.accuracy is None else {"accuracy": self.accuracy}
            told = "".join(f", {name} {value:.4f}" for name, value in {**more, **self.metrics}.items())
            return (
                f"held-out loss {self.loss:.4f}{told}, on {self.targets:,} targets in {self.rows:,} samples, "
                f"after step {self.step}"
            )
        return (
            f"held-out loss {self.loss:.4f}, perplexity {self.perplexity:.3f}, on {self.targets:,} tokens "
            f"in {self.rows:,} rows, after step {self.step}"
        )


class Checked(Record):
    """One folder of a run whose every byte matches its checksum."""

    step: int
    checked_bytes: int = Field(description="bytes read")


class CutVocabulary(Record):
    """What cutting a vocabulary down to a corpus changed.

    Attributes:
        before: tokens of the model as trained.
        after: tokens of the model as written.
        bytes_saved: of the weights written.
    """

    before: int
    after: int
    bytes_saved: int


class Exported(Record):
    """A model that was written for other tools.

    Attributes:
        output: the folder or .gguf file.
        dtype: of its matrices, by the format's own name.
        weight_bytes: of all weights in it, without headers.
        vocabulary: what was cut, where that was asked for.
    """

    output: str
    dtype: str
    weight_bytes: int
    vocabulary: CutVocabulary | None = None

    def __str__(self) -> str:
        if self.vocabulary is None:
            return f"wrote {self.output}"
        cut = self.vocabulary
        return (
            f"wrote {self.output}\nvocabulary: {cut.after:,} of {cut.before:,} tokens, "
            f"{cut.bytes_saved / 1e6:,.1f} MB saved of {(self.weight_bytes + cut.bytes_saved) / 1e6:,.1f}"
        )
