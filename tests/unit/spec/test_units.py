"""Amounts are read and printed as people write them."""

from __future__ import annotations

import random

import pytest

from packmule.errors import ConfigError
from packmule.spec.units import format_bytes, format_rate, format_seconds, format_share, parse_bytes


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("2.2GB", 2_200_000_000),
        ("1GiB", 1 << 30),
        ("500 MB", 500_000_000),
        ("1kb", 1000),
        ("1KiB", 1024),
        ("4G", 4_000_000_000),
        ("4Gi", 4 << 30),
        ("1e9", 1_000_000_000),
        ("1_000", 1000),
        ("0.5 tib", 1 << 39),
        (" 12 B ", 12),
        (4096, 4096),
        (2.5e9, 2_500_000_000),
    ],
)
def test_amounts_are_read(text: str | float, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize(
    "text", ["", "GB", "2 XB", "-1GB", "0", "2.2.2GB", "1e999", "nan", True, -5, 0.1, "1 G B"]
)
def test_other_text_is_refused_with_a_hint(text: str | float) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_bytes(text)
    assert repr(text) in caught.value.cause
    assert caught.value.hint


def test_printed_bytes_read_back_within_their_three_digits(seed: int) -> None:
    generator = random.Random(seed)
    for _ in range(2000):
        count = round(10 ** generator.uniform(0, 16))
        assert parse_bytes(format_bytes(count)) == pytest.approx(count, rel=0.5e-2)


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (999_499, "999 kB"), (999_500, "1 MB"), (-3e6, "-3 MB")],
)
def test_bytes_change_unit_where_three_digits_end(count: float, text: str) -> None:
    assert format_bytes(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0000012, "1 us"),
        (0.0032, "3.2 ms"),
        (0.9999, "1 s"),
        (41.53, "41.5 s"),
        (59.97, "1 min 00 s"),
        (725, "12 min 05 s"),
        (3599.9, "1 h 00 min"),
        (25_320, "7 h 02 min"),
        (86_399, "1 d 00 h"),
        (1e6, "11 d 14 h"),
        (-2, "-2 s"),
        (float("inf"), "unknown"),
    ],
)
def test_durations_are_for_people(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


def test_rates_carry_their_unit() -> None:
    assert format_rate(1.23e9) == "1.23 GB/s"
    assert format_rate(85e9, "FLOP") == "85 GFLOP/s"
    assert format_rate(312.4, "tokens") == "312 tokens/s"


@pytest.mark.parametrize(
    ("share", "text"),
    [
        (0, "0 %"), (1e-9, "under 0.001 %"), (3e-5, "0.003 %"), (0.00234, "0.23 %"), (0.0712, "7.1 %"),
        (0.123, "12 %"), (25.5, "2,550 %"),
    ],
)  # fmt: skip
def test_shares_are_percentages(share: float, text: str) -> None:
    assert format_share(share) == text
