"""What torch allocates outside the declared buffers, against `layer_workspace`.

Method: run once (libraries make their caches), give free memory back, reset the process's peak
(/proc/self/clear_refs), run again; the workspace is VmHWM now less VmRSS before.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.parity.plain import TYPES
from torch import Tensor

from packmule.kernels import load, native
from packmule.models import decoder as bodies_of
from packmule.models import experts as mixture
from packmule.models.context import Decoder, TokenBatch
from packmule.models.views import views
from packmule.shapes import bodies, experts
from packmule.shapes.experts import Experts
from packmule.shapes.layer import LayerKind, Variant
from packmule.shapes.layout import TensorSpec, layout
from packmule.shapes.model import ModelShape
from packmule.shapes.rope import LongRope, Rope
from packmule.spec.batch import Batch

SHAPE = ModelShape(4096, 512, 1, 8, 4, 64, 1408, 1e-5, 1e4, False, 2048)
TOKENS = 2048

pytestmark = pytest.mark.skipif(
    native.library_path() is None,
    reason="the twin in torch allocates freely; the bound is for native kernels",
)


def memory(key: str) -> int:
    """Bytes of one line of /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(key))


def peak_bytes(body: Callable[[], object], bound: int = 0) -> int:
    """By the module's method; the least of three, or the first within a bound, since a process that has
    run other tests also faults in what those left behind."""
    body()
    found: list[int] = []
    while len(found) < 3 and min(found, default=bound + 1) > bound:
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
        before = memory("VmRSS")
        body()
        found.append(memory("VmHWM") - before)
    return min(found)


def buffers(specs: tuple[TensorSpec, ...]) -> dict[str, Tensor]:
    place = layout(specs)
    return views(torch.zeros(place.bytes, dtype=torch.uint8), place)


def test_the_method_sees_an_allocation() -> None:
    assert peak_bytes(lambda: torch.ones(8 << 20).sum()) > 30 << 20


GEMMA = replace(
    SHAPE,
    variant=Variant(
        activation="gelu_tanh",
        norm_offset=1.0,
        post_norms=True,
        qk_norm=True,
        attention_cap=50.0,
        logit_cap=30.0,
    ),
    kinds=(LayerKind(window=300),),
)
GPT2 = replace(
    SHAPE,
    variant=Variant(
        activation="gelu_tanh", gated=False, norm="layer", qkv_bias=True, o_bias=True, mlp_bias=True,
        learned_positions=True,
    ),
)  # fmt: skip
LONGROPE = LongRope((1.0,) * 32, (2.0,) * 32, 300, 1.2)
PHI3 = replace(SHAPE, kinds=(LayerKind(rope=Rope(1e4, 64, LONGROPE)),))


@pytest.mark.parametrize("precision", ("fp32", "bf16-mixed", "bf16-wide"))
@pytest.mark.parametrize("length", (64, 512, TOKENS))
def test_a_layer_stays_within_its_workspace(precision: str, length: int) -> None:
    check_layer(SHAPE, precision, length)


@pytest.mark.parametrize("precision", ("fp32", "bf16-mixed"))
@pytest.mark.parametrize("shape", (GEMMA, GPT2, PHI3), ids=("gemma", "gpt2", "phi3"))
def test_a_layer_of_another_family_stays_within_its_workspace(precision: str, shape: ModelShape) -> None:
    check_layer(shape, precision, 512)


def check_layer(shape: ModelShape, precision: str, length: int) -> None:
    """Forward and backward of one layer over TOKENS tokens, within `layer_workspace`."""
    types, layer = TYPES[precision], shape.layer(1)
    decoder = Decoder.create(load(2), shape, TYPES[precision], length)
    ids = np.zeros(TOKENS, dtype=np.int64)
    positions = np.arange(TOKENS, dtype=np.int32) % length
    batch = TokenBatch.from_batch(Batch(ids, ids.copy(), positions, (length,) * (TOKENS // length)))
    block = shape.blocks()[1]
    weights, grads = buffers(block.specs(types.compute)), buffers(block.specs(types.gradient))
    for weight in weights.values():
        weight.normal_(0, 0.02)
    stream = buffers((bodies.input_spec(SHAPE, TOKENS, types),))
    x, out, dx = (stream["x"], torch.zeros_like(stream["x"]), torch.zeros_like(stream["x"]))
    x.normal_()
    saved = buffers(bodies.layer_saved(layer, TOKENS, types))
    scratch = buffers(bodies.layer_backward_scratch(layer, TOKENS, types))

    def body() -> None:
        bodies_of.layer_forward(decoder, layer, weights, batch, x, saved, scratch, out)
        bodies_of.layer_backward(decoder, layer, weights, batch, x, saved, scratch, x, dx, grads, True, True)

    bound = bodies.layer_workspace(layer, TOKENS, types)
    assert peak_bytes(body, bound) <= bound
    decoder.kernels.close()


@pytest.mark.parametrize("precision", ("fp32", "bf16-mixed", "bf16-wide"))
def test_experts_stay_within_their_workspace(precision: str) -> None:
    """Those of one group, with and without what the forward computed, and their router."""
    types, kernels, hidden = TYPES[precision], load(2), SHAPE.hidden
    own = Experts(count=8, chosen=2, width=512, renormalize=True, balance=0.1, groups=1)
    weights = buffers(block_specs(own, types.compute))
    grads = buffers(block_specs(own, types.gradient))
    for weight in weights.values():
        weight.normal_(0, 0.02)
    routed = buffers(experts.routed(own, hidden, TOKENS, types))
    routed["normed"].normal_()
    dispatched = buffers(experts.dispatched(own, hidden, TOKENS, types))
    mixed = buffers(experts.mixed(hidden, TOKENS, types))["mixed"]
    saved = buffers(experts.experts_saved(own, TOKENS, types))
    router = own.scratch(hidden, TOKENS, types, backward=True)
    scratch = buffers((*bodies.experts_scratch(own, hidden, TOKENS, types, True, False), *router))
    stream = buffers((bodies.input_spec(SHAPE, TOKENS, types),))["x"]
    balance, even = torch.zeros(2, 8, dtype=torch.float64), torch.zeros(8)

    def body() -> None:
        mixture.route(kernels, own, weights["router.weight"], TOKENS, routed, scratch, balance)
        for kept in (None, saved):
            arguments = (kernels, own, range(8), weights, TOKENS, routed, kept, scratch)
            mixture.experts_forward(*arguments, mixed)
            mixture.experts_backward(*arguments, stream, dispatched, grads, True, True)
        mixture.route_backward(
            kernels, own, weights["router.weight"], routed, dispatched, even, grads["router.weight"], True,
            scratch, stream,
        )  # fmt: skip

    assert peak_bytes(body, bodies.KERNEL_WORKSPACE) <= bodies.KERNEL_WORKSPACE
    kernels.close()


def block_specs(own: Experts, dtype: str) -> tuple[TensorSpec, ...]:
    """The router and all experts of a layer."""
    parameters = own.parameters(SHAPE.hidden, 1.0) + own.group_parameters(SHAPE.hidden, 1.0, range(own.count))
    return tuple(TensorSpec(p.name, p.shape, dtype) for p in parameters)


@pytest.mark.parametrize("precision", ("fp32", "bf16-mixed", "bf16-wide"))
def test_the_head_stays_within_its_workspace(precision: str) -> None:
    types, chunk = TYPES[precision], 512
    decoder = Decoder.create(load(2), SHAPE, TYPES[precision], TOKENS)
    ids = np.zeros(TOKENS, dtype=np.int64)
    batch = TokenBatch.from_batch(Batch(ids, ids.copy(), np.arange(TOKENS, dtype=np.int32), (TOKENS,)))
    block = SHAPE.blocks()[-1]
    weights, grads = buffers(block.specs(types.compute)), buffers(block.specs(types.gradient))
    x = buffers((bodies.input_spec(SHAPE, TOKENS, types),))["x"]
    scratch, dx = buffers(bodies.head_scratch(SHAPE, chunk, types, True)), torch.zeros_like(x)
    used = peak_bytes(
        lambda: bodies_of.head_loss(decoder, weights, batch, x, 1e-3, chunk, dx, grads, scratch, True),
        bodies.KERNEL_WORKSPACE,
    )
    assert used <= bodies.KERNEL_WORKSPACE
    decoder.kernels.close()
