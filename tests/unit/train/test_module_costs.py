"""Which of a user's blocks are taken to cost the same."""

from __future__ import annotations

import pytest

from packmule.errors import ConfigError
from packmule.train.module_costs import looks, refuse_unlike


def kinds(*settings: dict[str, object]) -> list[int]:
    """Numbers of the kinds of embed, some blocks and head, in order of their first."""
    held = [{("", name): value for name, value in block.items()} for block in settings]
    found = looks(["embed", *["block"] * (len(held) - 2), "head"], held)
    order = list(dict.fromkeys(found))
    return [order.index(look) for look in found]


def test_a_blocks_own_number_makes_no_kind() -> None:
    blocks = [{"heads": 2, "index": number} for number in range(5)]
    assert kinds({}, *blocks, {}) == [0, 1, 1, 1, 1, 1, 2]


def test_settings_that_differ_make_kinds_also_where_one_is_a_blocks_number() -> None:
    windows = [2, 0, 2, 0, 2]
    assert kinds({}, *({"window": window} for window in windows), {}) == [0, 1, 2, 1, 2, 1, 3]
    assert kinds({}, *({"causal": number == 1} for number in range(3)), {}) == [0, 1, 2, 1, 3]
    assert kinds({}, {"heads": 0}, {}) == [0, 1, 2]


def test_samples_of_another_size_than_those_trained_on_are_refused() -> None:
    names = ["embed", "blocks.0", "head"]
    refuse_unlike(names, [None, (3, 4), (4,)], [None, (3, 4), (4,)])
    with pytest.raises(ConfigError) as caught:
        refuse_unlike(names, [None, (3, 4), (4,)], [None, (3, 4), (5,)])
    assert caught.value.cause == (
        "`blocks.0` gave (5,) for a sample that is evaluated on, and (4,) for one that is trained on."
    )
