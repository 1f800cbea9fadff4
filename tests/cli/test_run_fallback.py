"""Without native kernels (a pure-Python wheel, another platform) the same commands run on torch twins."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from tests.cli.bench import Bench

import packmule

WITHOUT_EDITABLE = """import sys
sys.meta_path[:] = [f for f in sys.meta_path if not type(f).__module__.startswith("_editable")]
"""
"""As sitecustomize: an editable install's finder would come before any path."""


@pytest.fixture(scope="module")
def pure(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder to import from that holds packmule as a pure-Python wheel does."""
    folder = tmp_path_factory.mktemp("pure")
    source = Path(packmule.__file__).parent
    shutil.copytree(source, folder / "packmule", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    (folder / "sitecustomize.py").write_text(WITHOUT_EDITABLE)
    return folder


def test_a_run_without_native_kernels_trains_and_comes_to_the_same(pure: Path, bench: Bench) -> None:
    changes = {"train__max_steps": 3, "hardware__state": "disk", "train__eval_rows": 4}
    for name, variables in (("twins", {"PYTHONPATH": str(pure)}), ("kernels", {})):
        bench.run("train", bench.job(name, **changes).name, "--quiet", **variables).succeeded()
    plan = json.loads((bench.folder / "twins" / "plan.json").read_text())
    assert plan["numerics"]["kernels"] == "torch"
    losses = []
    for name in ("twins", "kernels"):
        lines = (bench.folder / name / "log.jsonl").read_text().splitlines()
        found = [entry["train/loss"] for entry in map(json.loads, lines) if "train/loss" in entry]
        assert len(found) == 3
        losses.append(found)
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    verified = bench.run("verify", "twins", "--json", PYTHONPATH=str(pure)).succeeded().json
    assert verified["twins"]["step"] == 3
