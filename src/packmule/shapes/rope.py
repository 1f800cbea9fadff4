"""Rotary position embeddings as numbers. The tables are made in packmule.models.rope."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Rope:
    """Rotary embedding of queries and keys (Su et al. 2021, arXiv:2104.09864).

    Attributes:
        theta: base of the wavelengths.
        dims: the first dimensions of each head that turn; even.
    """

    theta: float
    dims: int
