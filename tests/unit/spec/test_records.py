"""What a record says of data that is none."""

from __future__ import annotations

import pytest

from packmule.errors import ConfigError
from packmule.spec.records import Record, nearest


class Sack(Record):
    name: str
    grains: int = 0


@pytest.mark.parametrize(
    "data",
    [
        {"name": ["x" * 1_000_000]},
        {"name": "n", "grain" * 200_000: 1},
        {"name": [[["deep"] * 9999] * 9] * 9},
    ],
)
def test_a_message_is_short_however_long_what_is_wrong(data: object) -> None:
    with pytest.raises(ConfigError) as raised:
        Sack.parse(data, "sack.json")
    assert "sack.json: " in raised.value.cause
    assert len(str(raised.value)) < 1500


def test_the_nearest_key_is_named_and_short_values_are_shown_whole() -> None:
    assert nearest("grians", ["name", "grains"]) == "grains"
    with pytest.raises(ConfigError, match=r"did you mean `grains`"):
        Sack.parse({"name": "a", "grain": 4}, "sack.json")
    with pytest.raises(ConfigError, match=r"`grains` = 'many'"):
        Sack.parse({"name": "a", "grains": "many"}, "sack.json")
