"""Starting stays quick: the limits of benchmarks/startup.py."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

BENCHMARK = Path(__file__).resolve().parents[2] / "benchmarks" / "startup.py"


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("startup", BENCHMARK)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_import_and_help_stay_within_their_cpu_time() -> None:
    startup = load()
    above = startup.above_bare(startup.measure())
    assert not {name: value for name, value in above.items() if value >= startup.LIMITS[name]}
