"""Bytes, seconds and rates as people write and read them. Pure functions on numbers and text.

Decimal units (kB, MB, GB, TB) are powers of 1000, as disks are sold; binary units (KiB, MiB,
GiB, TiB) are powers of 1024 (IEC 80000-13). What is printed is decimal, like what is typed.
"""

from __future__ import annotations

import math
import re

from packmule.errors import ConfigError

_FACTORS = {"": 1, "b": 1} | {
    f"{prefix}{suffix}": base ** (power + 1)
    for power, prefix in enumerate("kmgtp")
    for suffix, base in (("", 1000), ("b", 1000), ("i", 1024), ("ib", 1024))
}
_AMOUNT = re.compile(r"\s*(\d[\d_]*\.?\d*(?:[eE][-+]?\d+)?|\.\d+)\s*([A-Za-z]*)\s*")


def parse_bytes(value: float | str) -> int:
    """Bytes from a number or from text like "2.2GB", "1GiB", "500 MB", "4e9".

    Raises:
        ConfigError: not an amount, an unknown unit, not finite, or less than one byte.
    """
    hint = "write a number of bytes or an amount with a unit, like 2.2GB or 1GiB"
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise ConfigError(f"{value!r} is not an amount of bytes.", hint)
    if isinstance(value, (int, float)):
        amount, factor = float(value), 1
    else:
        found = _AMOUNT.fullmatch(value)
        if found is None:
            raise ConfigError(f"{value!r} is not an amount of bytes.", hint)
        unit = found[2].lower()
        if unit not in _FACTORS:
            raise ConfigError(
                f"{value!r}: unknown unit {found[2]!r}.", "use kB, MB, GB, TB, KiB, MiB, GiB or TiB"
            )
        amount, factor = float(found[1]), _FACTORS[unit]
    if not math.isfinite(amount) or amount * factor < 1:
        raise ConfigError(f"{value!r} is not an amount of bytes of at least 1.", hint)
    return round(amount * factor)


def format_bytes(count: float) -> str:
    """Three significant digits in decimal units: 2_200_000_000 -> "2.2 GB"."""
    sign, size = ("-" if count < 0 else ""), abs(float(count))
    if size < 1000:
        return f"{sign}{size:.0f} B"
    for unit in ("kB", "MB", "GB", "TB", "PB"):
        size /= 1000
        # 999.5 would print as 1e+03: it belongs to the next unit.
        if size < 999.5 or unit == "PB":
            break
    return f"{sign}{_three_digits(size)} {unit}"


def format_seconds(seconds: float) -> str:
    """A duration for people: "3.2 ms", "41.5 s", "12 min 05 s", "7 h 02 min", "3 d 04 h"."""
    if not math.isfinite(seconds):
        return "unknown"
    if seconds < 0:
        return f"-{format_seconds(-seconds)}"
    if seconds < 0.9995:
        milliseconds = seconds * 1e3
        return f"{_three_digits(milliseconds)} ms" if milliseconds >= 0.9995 else f"{seconds * 1e6:.0f} us"
    if seconds < 59.95:
        return f"{_three_digits(seconds)} s"
    minutes = round(seconds / 60)
    if seconds < 3599.5:
        whole, rest = divmod(round(seconds), 60)
        return f"{whole} min {rest:02d} s"
    if minutes < 24 * 60:
        return f"{minutes // 60} h {minutes % 60:02d} min"
    hours = round(seconds / 3600)
    return f"{hours // 24} d {hours % 24:02d} h"


def format_rate(per_second: float, unit: str = "B") -> str:
    """A rate: bytes as "1.2 GB/s", anything else with a prefix: "85 GFLOP/s", "312 tokens/s"."""
    if unit == "B":
        return f"{format_bytes(per_second)}/s"
    size, prefix = float(per_second), ""
    if unit == "FLOP":
        for prefix in ("", "k", "M", "G", "T", "P"):
            if abs(size) < 999.5 or prefix == "P":
                break
            size /= 1000
    return f"{_three_digits(size)} {prefix}{unit}/s"


def _three_digits(size: float) -> str:
    decimals = 2 if abs(size) < 9.995 else 1 if abs(size) < 99.95 else 0
    text = f"{size:.{decimals}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def format_share(share: float) -> str:
    """A part of a whole as a percentage: 0.0712 -> "7.1 %", 3e-5 -> "0.003 %", 0 -> "0 %"."""
    percent = 100 * share
    if percent >= 10 or percent == 0:
        return f"{percent:,.0f} %"
    if percent < 0.001:
        return "under 0.001 %"
    return f"{percent:.{1 if percent >= 1 else 2 if percent >= 0.1 else 3}f} %"
