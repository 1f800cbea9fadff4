"""Rotary position embeddings as numbers, and the ways to stretch them over longer contexts.

The tables are made in packmule.models.rope. Formulas and names are those of transformers'
modeling_rope_utils, so that a config.json means the same to both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import log, sqrt
from typing import Any

from packmule.errors import ConfigError
from packmule.shapes.config import Config


@dataclass(frozen=True)
class Linear:
    """Positions are divided by a factor (Chen et al. 2023, arXiv:2306.15595)."""

    factor: float


@dataclass(frozen=True)
class Llama3:
    """Long wavelengths are divided by a factor, short ones kept, those between mixed (Llama 3.1,
    Grattafiori et al. 2024, arXiv:2407.21783).

    Attributes:
        low, high: wavelengths above original / low are long, below original / high short.
        original: positions the model was first trained on.
    """

    factor: float
    low: float
    high: float
    original: int


@dataclass(frozen=True)
class Yarn:
    """Dimensions that turn often are kept, those that turn seldom divided by a factor (Peng et al.
    2023, arXiv:2309.00071).

    Attributes:
        fast, slow: turns within `original` positions between which the two are mixed.
        truncate: the bounds are whole dimensions.
        attention: multiplies cos and sin.
    """

    factor: float
    original: int
    fast: float
    slow: float
    truncate: bool
    attention: float


@dataclass(frozen=True)
class LongRope:
    """Every frequency is divided by a factor of its own (Ding et al. 2024, arXiv:2402.13753).

    Attributes:
        short, long: of documents of at most, and of more than, `original` positions.
        attention: multiplies cos and sin.
    """

    short: tuple[float, ...]
    long: tuple[float, ...]
    original: int
    attention: float


Scaling = Linear | Llama3 | Yarn | LongRope


@dataclass(frozen=True)
class Rope:
    """Rotary embedding of queries and keys (Su et al. 2021, arXiv:2104.09864).

    Attributes:
        theta: base of the wavelengths.
        dims: the first dimensions of each head that turn; even.
    """

    theta: float
    dims: int
    scaling: Scaling | None = None

    def rows(self, positions: int) -> int:
        """Rows of its tables: LongRope turns long documents in their own way."""
        both = isinstance(self.scaling, LongRope) and positions > self.scaling.original
        return positions * (1 + both)


def _linear(config: Config, dims: int, positions: int, original: int) -> Linear:
    return Linear(_factor(config))


def _dynamic(config: Config, dims: int, positions: int, original: int) -> None:
    """Stretches texts beyond the model's positions only, and no row is longer than those."""
    _factor(config)


def _llama3(config: Config, dims: int, positions: int, original: int) -> Llama3:
    low, high = (config.optional_number(key) for key in ("low_freq_factor", "high_freq_factor"))
    if low is None or high is None or low >= high:
        raise ConfigError(
            f"{config.source}: low_freq_factor must be a number below high_freq_factor.",
            "restore the model's own config.json",
        )
    return Llama3(_factor(config), low, high, original)


def _yarn(config: Config, dims: int, positions: int, original: int) -> Yarn:
    factor = config.optional_number("factor") or positions / original

    def mscale(size: float = 1.0) -> float:
        return 1.0 if factor <= 1 else 0.1 * size * log(factor) + 1.0

    attention = config.optional_number("attention_factor")
    if attention is None:
        parts = [config.optional_number(key) for key in ("mscale", "mscale_all_dim")]
        attention = mscale() if None in parts else mscale(parts[0] or 1.0) / mscale(parts[1] or 1.0)
    return Yarn(
        factor,
        original,
        config.number("beta_fast", 32.0),
        config.number("beta_slow", 1.0),
        config.get("truncate") is not False,
        attention,
    )


def _longrope(config: Config, dims: int, positions: int, original: int) -> LongRope:
    factor = config.optional_number("factor") or positions / original
    attention = config.optional_number("attention_factor")
    if attention is None:
        attention = 1.0 if factor <= 1 else sqrt(1 + log(factor) / log(original))
    short, long = (_factors(config, key, dims // 2) for key in ("short_factor", "long_factor"))
    return LongRope(short, long, original, attention)


def _factor(config: Config) -> float:
    found = config.optional_number("factor")
    if found is None:
        raise ConfigError(f"{config.source}: 'factor' is missing.", "use the model's full config.json")
    return found


def _factors(config: Config, key: str, count: int) -> tuple[float, ...]:
    values = config.get(key)
    if (
        not isinstance(values, list)
        or len(values) != count
        or not all(isinstance(v, int | float) and not isinstance(v, bool) and v > 0 for v in values)
    ):
        raise config.wrong(key, f"a list of {count} numbers above 0")
    return tuple(float(value) for value in values)


SCALINGS: dict[str, Callable[[Config, int, int, int], Any]] = {
    "default": lambda config, dims, positions, original: None,
    "linear": _linear,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "llama3": _llama3,
    "longrope": _longrope,
}
"""rope_type -> how its keys read."""


def read_rope(
    config: Config,
    head_dim: int,
    section: Config | None = None,
    theta: float | None = None,
    partial: bool = False,
    names: Mapping[str, str] | None = None,
) -> Rope:
    """The rotary embedding that a config.json describes.

    Args:
        config: the whole file.
        section: the part that describes this one, where there are several; by default
            `rope_parameters`, or `rope_scaling` of older files.
        theta: base of the wavelengths where the section says nothing; by default `rope_theta`.
        partial: whether the family may turn only part of each head.
        names: what other names of types stand for.

    Raises:
        ConfigError: an unknown type, or parameters that are missing or wrong.
    """
    if section is None:
        section = config.section("rope_scaling" if config.get("rope_scaling") else "rope_parameters")
    name = section.get("rope_type") or section.get("type") or "default"
    kind = (names or {}).get(name, name) if isinstance(name, str) else name
    if not isinstance(kind, str) or kind not in SCALINGS:
        raise ConfigError(
            f"{section.source}: rope_type {name!r} is not supported.", f"supported: {', '.join(SCALINGS)}"
        )
    section.refuse("mrope_section")
    share = section.optional_number("partial_rotary_factor") or config.number("partial_rotary_factor", 1.0)
    if share != 1 and not partial:
        raise ConfigError(
            f"{section.source}: partial_rotary_factor is not supported for this model_type.",
            "restore the model's own config.json",
        )
    dims = int(head_dim * share)
    if dims < 2 or dims % 2 or dims > head_dim:
        raise ConfigError(
            f"{section.source}: {dims} of {head_dim} dimensions of each head would turn, which is no even "
            "number of at least 2.",
            "restore the model's own config.json",
        )
    positions = config.integer("max_position_embeddings")
    original = config.optional_integer("original_max_position_embeddings")
    original = original or section.optional_integer("original_max_position_embeddings") or positions
    base = section.optional_number("rope_theta") or theta or config.number("rope_theta", 1e4)
    if base <= 1 or original < 2:
        raise ConfigError(
            f"{section.source}: rope_theta must be above 1 and original_max_position_embeddings above 1.",
            "restore the model's own config.json",
        )
    return Rope(base, dims, SCALINGS[kind](section, dims, positions, original))
