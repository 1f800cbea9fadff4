"""Documents -> ids and which of them carry loss, a batch at a time."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from packmule.data.documents import Document, Marked, Numbered
from packmule.data.store import Segment
from packmule.data.template import Spans
from packmule.data.text import Piece
from packmule.data.tokenizer import TextTokenizer

EXAMPLE_TOKENS = 192
"""Tokens of an example."""


class Encoded(NamedTuple):
    """A document's ids, or a part of them.

    Attributes:
        ids: with bos and eos where they belong.
        trained: bool, like ids: which carry loss as targets; None: all.
        first, last: whether it begins and ends its document.
    """

    ids: Sequence[int]
    trained: np.ndarray | None
    first: bool
    last: bool


def encode(batch: Sequence[Document], tokenizer: TextTokenizer) -> list[Encoded]:
    """The ids of some documents, in order; all texts of a kind are encoded in one go."""
    found: list[Encoded | None] = [None] * len(batch)
    for first, encoder in ((True, tokenizer.encode), (False, tokenizer.encode_continued)):
        chosen = [(i, d) for i, d in enumerate(batch) if isinstance(d, Piece) and d.first is first]
        for (i, piece), ids in zip(chosen, encoder([piece.text for _, piece in chosen]), strict=True):
            if first and tokenizer.add_bos and tokenizer.bos is not None:
                ids = [tokenizer.bos, *ids]
            if piece.last:
                ids.append(tokenizer.eos)
            found[i] = Encoded(ids, None, first, piece.last)
    marked = [(i, d) for i, d in enumerate(batch) if isinstance(d, Marked)]
    for (i, document), (ids, begins, ends) in zip(
        marked, tokenizer.encode_places([document.text for _, document in marked]), strict=True
    ):
        found[i] = _marked(document, tokenizer, ids, begins, ends)
    for i, other in enumerate(batch):
        if isinstance(other, Numbered):
            found[i] = Encoded(other.tokens.ids.tolist(), other.tokens.trained, True, True)
    return [encoded for encoded in found if encoded is not None]


def _marked(
    document: Marked, tokenizer: TextTokenizer, ids: list[int], begins: np.ndarray, ends: np.ndarray
) -> Encoded:
    trained = trained_tokens(document.trained, begins, ends)
    if document.begin and tokenizer.add_bos and tokenizer.bos is not None:
        ids, trained = [tokenizer.bos, *ids], np.concatenate([[False], trained])
    if document.finish:
        ids, trained = [*ids, tokenizer.eos], np.concatenate([trained, [True]])
    return Encoded(ids, trained, True, True)


def trained_tokens(spans: Spans, begins: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Which tokens hold a character of a span: bool [n].

    A token that reaches over the border of a span counts, as in transformers' assistant masks.

    Args:
        spans: ranges of characters, in order.
        begins, ends: the characters of each token, [n], not decreasing.
    """
    trained = np.zeros(len(begins), bool)
    for begin, end in spans:
        if end > begin:
            first = np.searchsorted(ends, begin, "right")
            trained[first : np.searchsorted(begins, end, "left")] = True
    return trained


def example(encoded: Encoded, tokenizer: TextTokenizer) -> tuple[Segment, ...]:
    """The beginning of a document as text, cut where loss begins and ends."""
    ids = encoded.ids[:EXAMPLE_TOKENS]
    trained = np.ones(len(ids), bool) if encoded.trained is None else encoded.trained[: len(ids)]
    borders = [0, *(np.flatnonzero(trained[1:] != trained[:-1]) + 1).tolist(), len(ids)]
    return tuple(
        Segment(text=tokenizer.decode(ids[begin:end], special=True), loss=bool(trained[begin]))
        for begin, end in pairwise(borders)
        if end > begin
    )
