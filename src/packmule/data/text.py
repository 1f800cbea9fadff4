"""Long texts in pieces that tokenize like the whole: where a text may be cut, and the cutting."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

PIECE_CHARACTERS = 1 << 15
"""Longer documents are handed on in pieces of about this many characters."""


class Piece(NamedTuple):
    """Part of a document, every token of which carries loss.

    Attributes:
        text: of this part.
        first, last: whether it begins and ends its document.
        end: bytes of its file read so far.
    """

    text: str
    first: bool
    last: bool
    end: int


def cut(blocks: Iterator[tuple[str, int]]) -> Iterator[Piece]:
    """One document's (text, bytes read so far) as pieces, cut where no tokenizer joins characters; an
    empty document has none."""
    waiting, first, end = "", True, 0
    for text, end in blocks:
        waiting += text
        while len(waiting) > PIECE_CHARACTERS:
            at = seam(waiting, PIECE_CHARACTERS)
            yield Piece(waiting[:at], first, False, end)
            waiting, first = waiting[at:], False
    if waiting or not first:
        yield Piece(waiting, first, True, end)


def cut_text(text: str, end: int) -> Iterator[Piece]:
    """`cut` for a text that is in memory."""
    return cut((text[i : i + PIECE_CHARACTERS], end) for i in range(0, len(text), PIECE_CHARACTERS))


def seam(text: str, limit: int) -> int:
    """Where to cut `text` so that both sides give the tokens of the whole: after the last lone
    newline, else before the last lone space, at most `limit`; else at `limit`.

    Pre-tokenizers join runs of white space, so the white space at a seam must be one character.
    """
    for mark, after in (("\n", 1), (" ", 0)):
        at = text.rfind(mark, 1, limit - 1)
        while at > 0 and (text[at - 1].isspace() or text[at + 1].isspace()):
            at = text.rfind(mark, 1, at)
        if at > 0:
            return at + after
    return limit
