"""The environment becomes a record; what is not honored is not in it."""

from __future__ import annotations

from pathlib import Path

import pytest

from packmule.spec.environment import read_environment


def test_variables_that_mirror_flags_are_kept_sorted_without_our_own_settings() -> None:
    found = read_environment(
        {"PACKMULE_RAM": "2GB", "PACKMULE_CACHE": "/c", "PACKMULE_DEBUG": "1", "PACKMULE_LR": "1"}
    )
    assert found.variables == (("PACKMULE_LR", "1"), ("PACKMULE_RAM", "2GB"))
    assert found.cache == Path("/c")
    assert found.debug


@pytest.mark.parametrize(
    ("variables", "cache"),
    [
        ({"HOME": "/h"}, "/h/.cache/packmule"),
        ({"HOME": "/h", "XDG_CACHE_HOME": "/x"}, "/x/packmule"),
        ({"HOME": "/h", "XDG_CACHE_HOME": "", "PACKMULE_CACHE": ""}, "/h/.cache/packmule"),
    ],
)
def test_cache_follows_the_xdg_base_directories(variables: dict[str, str], cache: str) -> None:
    assert read_environment(variables).cache == Path(cache)


@pytest.mark.parametrize(("text", "threads"), [("4", 4), ("4,2", 4), ("", None), ("0", None), ("many", None)])
def test_omp_num_threads_is_a_count_or_nothing(text: str, threads: int | None) -> None:
    assert read_environment({"OMP_NUM_THREADS": text}).omp_num_threads == threads


def test_a_child_gets_all_variables_with_changes() -> None:
    found = read_environment({"A": "1", "B": "2"})
    assert found.of_child(B="3") == {"A": "1", "B": "3"}
    assert read_environment({"PACKMULE_DEBUG": "0"}).debug is False
