"""The dtype that matrices are multiplied in follows from what was measured."""

from __future__ import annotations

import random

import pytest
from tests.unit.plan.situations import make_hardware

from packmule.spec.hardware import Hardware, MatmulPoint


def measured(bfloat16: float, float32: float, seed: int) -> Hardware:
    """A machine with these rates at the largest size, and the opposite at a small one."""
    rates = {"bfloat16": (float32, bfloat16), "float32": (bfloat16, float32), "float64": (1e9, 1e9)}
    return make_hardware(random.Random(seed)).model_copy(
        update={
            "matmul": {
                dtype: tuple(
                    MatmulPoint(size=size, flops_per_second=rate)
                    for size, rate in zip((256, 2048), pair, strict=True)
                )
                for dtype, pair in rates.items()
            }
        }
    )


@pytest.mark.parametrize(
    ("bfloat16", "float32", "expected"), ((1.5e11, 3e11, "float32"), (4e11, 2e11, None), (2e11, 2e11, None))
)
def test_bf16_is_multiplied_in_float32_only_where_that_is_faster(
    bfloat16: float, float32: float, expected: str | None, seed: int
) -> None:
    hardware = measured(bfloat16, float32, seed)
    assert hardware.wider_product("bf16-mixed") == expected
    assert hardware.wider_product("fp32") is None
    assert hardware.wider_product("fp64") is None
