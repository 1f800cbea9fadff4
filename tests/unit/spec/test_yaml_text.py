"""YAML is read the way people mean it."""

from __future__ import annotations

import math

import pytest
import yaml

from packmule.errors import ConfigError
from packmule.spec.yaml_text import dump_yaml, load_yaml, read_scalar


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4),
        ("1E5", 1e5),
        ("-2.5e3", -2500.0),
        (".5", 0.5),
        ("1.", 1.0),
        ("1_000", 1000),
        ("0x10", 16),
        ("7", 7),
        ("none", None),
        ("None", None),
        ("null", None),
        ("~", None),
        ("", None),
        ("true", True),
        ("False", False),
        ("no", "no"),
        ("on", "on"),
        ("1:30", "1:30"),
        ("2024-01-31", "2024-01-31"),
        ("1e-4x", "1e-4x"),
        ("nonesuch", "nonesuch"),
    ],
)
def test_scalars_in_files_and_flags_mean_the_same(text: str, value: object) -> None:
    for found in (load_yaml(f"key: {text}", "file")["key"], read_scalar(text)):
        assert found == value
        assert type(found) is type(value)


def test_quotes_keep_text_in_files() -> None:
    assert load_yaml("{a: '1e-4', b: \"none\"}", "file") == {"a": "1e-4", "b": "none"}
    assert math.isnan(load_yaml("a: .nan", "file")["a"])


def test_a_list_may_be_a_flag() -> None:
    assert read_scalar("[a, 'b c']") == ["a", "b c"]


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("a: b: c", "file, line 1, column 5"),
        ("a: 1\nb: [", "file, line 2"),
        ("\ta: 1", "file, line 1, column 1"),
        ("a: 1\na: 2", "file, line 2, column 1: the key `a` is written twice"),
        ("a: {b: 1, b: 2}", "`b` is written twice"),
        ("a: !!python/object:os.system 1", "file, line 1, column 4"),
        ("a: 1\n---\nb: 2", "file, line 2"),
        ("? [a]\n: 1", "file, line 1"),
        ("a: \x00", "file"),
    ],
)
def test_bad_yaml_is_named_with_its_place(text: str, where: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_yaml(text, "file")
    assert where in caught.value.cause
    assert caught.value.hint


def test_dumped_data_reads_back_equal_here_and_in_yaml_1_1() -> None:
    words = ["none", "None", "1e-4", "no", "on", "2024-01-31", "1:30", "~", "", "0x1", "plain", "a: b", "é"]
    data = {"words": words, "numbers": [1e-5, 3.0, 7, True, None]}
    text = dump_yaml(data)
    assert load_yaml(text, "file") == data
    assert yaml.safe_load(text) == data
