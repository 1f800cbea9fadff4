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
    best = startup.measure()
    over = {
        name: (best[name] - best["bare python"], limit)
        for name, limit in startup.LIMITS.items()
        if best[name] - best["bare python"] >= limit
    }
    assert not over
