"""The tiny tokenizers of tests/unit/data, for files that hold one beside weights."""

from tests.unit.data.conftest import byte_level, learned, sentencepiece

__all__ = ["byte_level", "learned", "sentencepiece"]
