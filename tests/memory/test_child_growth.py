"""What a child grows by while it works stays within what the planner counts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from tests.memory.child_growth import SHAPE, TOKENS

from packmule.kernels import native
from packmule.shapes import bodies

pytestmark = pytest.mark.skipif(
    native.library_path() is None,
    reason="the twin in torch allocates freely; the bound is for native kernels",
)


@cache
def grown(precision: str, kept: int, lengths: int) -> tuple[int, int]:
    """What child_growth.py prints in a fresh process: malloc and libraries are set up before torch is
    loaded."""
    script = Path(__file__).with_name("child_growth.py")
    environment = {
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "OMP_WAIT_POLICY": "passive",  # as the parent of a run sets it
    }
    done = subprocess.run(
        [sys.executable, str(script), precision, str(kept), str(lengths)],
        env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    resident, code = json.loads(done.stdout)
    return resident, code


@pytest.mark.parametrize("precision", ("fp32", "bf16-mixed"))
def test_documents_of_ever_new_lengths_stay_within_the_prediction(precision: str) -> None:
    types = bodies.DTYPES[precision]
    allowed = bodies.compiled_bytes(types) + bodies.layer_workspace(SHAPE.layer(1), TOKENS, types)
    assert grown(precision, bodies.PRIMITIVES_KEPT, 16)[0] <= allowed


def test_compiled_code_maps_no_more_than_the_limit_allows_for() -> None:
    code = grown("bf16-mixed", bodies.PRIMITIVES_KEPT, 16)[1]
    assert 0 < code <= bodies.code_bytes(bodies.DTYPES["bf16-mixed"])


def test_without_a_limit_compiled_products_pile_up() -> None:
    """Else the limit would be for nothing (oneDNN keeps 1024 by default)."""
    types = bodies.DTYPES["bf16-mixed"]
    allowed = bodies.compiled_bytes(types) + bodies.layer_workspace(SHAPE.layer(1), TOKENS, types)
    assert grown("bf16-mixed", 1024, 16)[0] > 2 * allowed
