"""The kernel contract, by table: one row of kernel_cases per method, inheriting every property.

Properties: each family agrees with the formula in float64; every build and thread count gives
the same bits; what is only written is never read. Below them: aliasing, extreme values, AdamW
against torch, bytes, refusals.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from tests.contract.kernel_cases import (
    ACTIVATED,
    ADALOMO,
    ADAMW,
    CAP,
    CASES,
    DTYPES,
    EPS,
    Tensors,
    call_rmsnorm_backward,
    integers,
    make_activate_backward,
    make_rmsnorm_backward,
    normal,
    unset,
    wide,
)

from packmule.kernels import load, native
from packmule.kernels.checks import ACTIVATIONS
from packmule.kernels.reference import TorchKernels

BUILDS = native.available()
FAMILIES = (*BUILDS[:1], "torch")  # the other builds are held to the first bit by bit

# (relative to the element, relative to the largest element of the output)
TOLERANCE = {
    torch.float64: (1e-13, 1e-14),
    torch.float32: (2e-6, 1e-6),
    torch.bfloat16: (2.0**-8, 2.0**-20),  # half a unit in the last place, doubled near powers of two
}


@pytest.fixture
def rng(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.fixture(params=FAMILIES)
def kernels(request: pytest.FixtureRequest) -> Iterator[Any]:
    found = load(2, request.param)
    yield found
    found.close()


def in_float64(tensors: Tensors) -> Tensors:
    return {name: t.double() if t.is_floating_point() else t for name, t in tensors.items()}


def assert_same_bits(one: Tensors, other: Tensors, what: str) -> None:
    for name, tensor in one.items():
        a, b = (t.contiguous().view(-1).view(torch.uint8) for t in (tensor, other[name]))
        assert torch.equal(a, b), f"{what}: {name} differs"


def by_table(test: Callable[..., None]) -> Callable[..., None]:
    test = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])(test)
    return pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)(test)


@by_table
def test_agrees_with_the_formula_in_float64(case, dtype, kernels, rng):
    for size in case.sizes:
        tensors = case.make(rng, dtype, size)
        got = case.run(kernels, tensors)
        want = case.formula(in_float64(tensors))
        for name, tensor in tensors.items():
            if name not in want:  # an input
                assert_same_bits({name: tensor}, got, f"{case.name} {size}")
                continue
            if not tensor.is_floating_point():
                assert torch.equal(got[name], want[name]), f"{size} {name}"
                continue
            relative, absolute = TOLERANCE[got[name].dtype]
            # A float64 output of float32 arithmetic, or the reverse, is only as good as the worse.
            if tensor.dtype != torch.bfloat16 and case.name.startswith("cast"):
                relative, absolute = TOLERANCE[tensor.dtype]
            a, b = got[name].double(), want[name]
            limit = relative * b.abs() + absolute * max(float(b.abs().max()), case.terms) * math.sqrt(size[0])
            worst = ((a - b).abs() - limit).max()
            assert worst <= 0, f"{size} {name}: off by {float((a - b).abs().max()):.3g}"


@by_table
def test_builds_and_thread_counts_give_the_same_bits(case, dtype, rng):
    if not BUILDS:
        pytest.skip("the native library is not built")
    for size in case.sizes:
        tensors = case.make(rng, dtype, size)
        first: Tensors | None = None
        for isa in BUILDS:
            for threads in (1, 2, 3):
                got = case.run(pool(isa, threads), tensors)
                first = got if first is None else first
                assert_same_bits(first, got, f"{size} {isa} {threads} threads")


@pytest.fixture(scope="module", autouse=True)
def close_pools() -> Iterator[None]:
    """One pool per build and thread count for the module; torch on one thread beside them."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
    for kernels in POOLS.values():
        kernels.close()
    POOLS.clear()


POOLS: dict[tuple[str, int], Any] = {}


def pool(isa: str, threads: int) -> Any:
    if (isa, threads) not in POOLS:
        POOLS[isa, threads] = load(threads, isa)
    return POOLS[isa, threads]


# ---- aliasing ----


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
def test_outputs_may_alias_inputs_where_the_contract_says(dtype, kernels, rng):
    n, h = 70, 300
    t = make_rmsnorm_backward(True, True)(rng, dtype, (n, h))
    plain = {name: x.clone() for name, x in t.items()}
    call_rmsnorm_backward(True)(kernels, plain)
    for alias in ("dy", "residual"):
        shared = {name: x.clone() for name, x in t.items()}
        shared["dx"] = shared[alias]
        call_rmsnorm_backward(True)(kernels, shared)
        assert_same_bits({name: plain[name] for name in ("dx", "dweight")}, shared, alias)
    for kind in ACTIVATIONS:
        t = make_activate_backward(True)(rng, dtype, (n * h,))
        plain = {name: x.clone() for name, x in t.items()}
        kernels.activate_backward(plain["da"], plain["gate"], plain["up"], plain["dgate"], plain["dup"], kind)
        kernels.activate_backward(t["da"], t["gate"], t["up"], t["gate"], t["up"], kind)
        assert_same_bits({"gate": plain["dgate"], "up": plain["dup"]}, t, kind)


# ---- extreme values ----


def test_cast_matches_torch_bit_for_bit_on_every_kind_of_float(kernels, rng):
    patterns = integers(rng, -(2**31), 2**31, 100_000, torch.int32)
    special = [0.0, -0.0, math.inf, -math.inf, 1e-45, 3.4e38, 1 + 2.0**-8, 1 + 3 * 2.0**-8]
    source = torch.cat((patterns.view(torch.float32), torch.tensor(special)))
    for src in (source, source.double(), source.to(torch.bfloat16)):
        for dtype in DTYPES:
            got, want = torch.empty_like(src, dtype=dtype), src.to(dtype)
            kernels.cast(got, src)
            assert torch.equal(got.isnan(), want.isnan())
            keep = ~want.isnan()
            assert_same_bits({"x": want[keep]}, {"x": got[keep]}, f"{src.dtype} to {dtype}")


@pytest.mark.parametrize("kind", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
def test_activations_saturate_without_nan(dtype, kind, kernels):
    gate = torch.tensor([-1e30, -1000, -89, -88, -87, -0.0, 0.0, 87, 88, 89, 1000, 1e30, math.nan]).to(dtype)
    one = torch.ones_like(gate)
    out, dgate, dup = (torch.empty_like(gate) for _ in range(3))
    kernels.activate(gate, one, out, kind)
    kernels.activate_backward(one, gate, one, dgate, dup, kind)
    x = gate.double().requires_grad_()
    want = ACTIVATED[kind](x)
    want[gate.abs() < 1e4].sum().backward()
    x.grad[gate >= 1e4] = 1.0  # autograd of the formula is NaN beyond the cube's range
    close = {"rtol": 2.0**-8, "atol": 1e-30, "equal_nan": True, "check_dtype": False}
    torch.testing.assert_close(out.double(), want.detach(), **close)
    torch.testing.assert_close(dup.double(), want.detach(), **close)
    finite = slice(0, -1)
    torch.testing.assert_close(dgate.double()[finite], x.grad[finite], **close | {"atol": 1e-6})
    assert dgate[-1].isnan()


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
def test_softcap_saturates_and_keeps_signs_and_nan(dtype, kernels):
    x = torch.tensor([-math.inf, -1e30, -100, -1e-30, -0.0, 0.0, 1e-30, 100, 1e30, math.inf]).to(dtype)
    want = CAP * torch.tanh(x.double() / CAP)
    got = torch.cat((x, torch.tensor([math.nan], dtype=dtype)))
    kernels.softcap(got, 1.0, CAP)
    torch.testing.assert_close(got[:-1].double(), want, rtol=2.0**-8, atol=0)
    assert got[-1].isnan() and torch.equal(got[:-1].sign(), x.sign())
    dy = torch.ones_like(got)
    kernels.softcap_backward(dy, got, 1.0, CAP)
    assert dy[0] == 0 and dy[4] == 1 and dy[-1].isnan()


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
def test_cross_entropy_with_masked_huge_and_nan_logits(dtype, kernels):
    vocab = 5000
    logits = torch.zeros(5, vocab)
    logits[0, :4000] = -math.inf  # whole blocks masked before the first finite logit
    logits[1, 7] = 1e30
    logits[2] = -1e30
    logits[3, 11] = math.nan
    logits[4] = torch.arange(vocab) * -0.01
    targets = torch.tensor([4500, 7, 3, 2, -100])
    logits, loss = logits.to(dtype), torch.empty(5, dtype=wide(dtype))
    want = torch.log_softmax(logits.double(), 1)
    kernels.cross_entropy(logits, targets, 2.0, loss, True)
    torch.testing.assert_close(loss[:3].double(), -want[[0, 1, 2], targets[:3]], rtol=1e-5, atol=1e-6)
    assert loss[3].isnan() and loss[4] == 0
    gradient = want.exp()
    gradient[[0, 1, 2], targets[:3]] -= 1
    torch.testing.assert_close(logits[:3].double(), 2 * gradient[:3], rtol=1e-2, atol=1e-6)
    assert logits[3].isnan().any() and not logits[4].any()


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
def test_routing_of_equal_huge_and_nan_logits(dtype, kernels):
    logits = torch.zeros(4, 5)
    logits[1] = torch.tensor([1.0, 7.0, 1.0, 7.0, 1.0])
    logits[2, 4] = 1e30
    logits[3] = math.nan
    chosen, share = torch.full((4, 3), -1, dtype=torch.int32), torch.empty(4, 3, dtype=wide(dtype))
    kernels.route(logits.to(dtype), True, chosen, share, torch.empty(5, dtype=wide(dtype)))
    assert chosen[:3].tolist() == [[0, 1, 2], [1, 3, 0], [4, 0, 1]]
    assert (
        int(chosen.min()) >= 0
        and int(chosen.max()) < 5
        and all(len(set(row)) == 3 for row in chosen.tolist())
    )
    torch.testing.assert_close(share[0], torch.full_like(share[0], 1 / 3))
    assert share[2].tolist() == [1, 0, 0] and share[3].isnan().all()


def test_rmsnorm_of_zero_and_tiny_rows_is_finite(kernels):
    x = torch.stack((torch.zeros(33), torch.full((33,), 1e-30), torch.full((33,), 1e18)))
    out, rstd = torch.empty_like(x), torch.empty(3)
    kernels.rmsnorm(x, torch.ones(33), EPS, out, rstd)
    torch.testing.assert_close(out[0], torch.zeros(33))
    torch.testing.assert_close(out[2], torch.ones(33))
    assert out.isfinite().all() and rstd.isfinite().all()


def test_nan_and_infinity_reach_the_sum_of_squares(kernels):
    for bad in (math.nan, math.inf):
        x = torch.ones(70_000)
        x[69_999] = bad
        assert not math.isfinite(kernels.sum_squares(x))
    assert kernels.sum_squares(torch.empty(0)) == 0
    assert kernels.sum_squares(torch.full((65536,), 1e30)) == pytest.approx(65536e60)


# ---- AdamW ----


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.float64, 1e-14)])
def test_adamw_follows_torch_for_twenty_steps(dtype, tolerance, kernels, rng):
    n = 4099
    start = normal(rng, n, dtype=dtype)
    theirs = torch.nn.Parameter(start.clone())
    optimizer = torch.optim.AdamW(
        [theirs], lr=3e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, foreach=False, fused=False
    )
    master, m, v = start.clone(), torch.zeros(n, dtype=dtype), torch.zeros(n, dtype=dtype)
    for step in range(1, 21):
        gradient = normal(rng, n, dtype=dtype, scale=10.0 ** (step % 5 - 3))
        gradient[::7] = 0
        theirs.grad = gradient * 0.5
        optimizer.step()
        kernels.adamw(master, m, v, gradient, None, 3e-3, 0.9, 0.95, 1e-8, 0.1, step, 0.5)
    torch.testing.assert_close(master, theirs.detach(), rtol=tolerance, atol=tolerance)


def test_adamw_with_zero_gradients_only_decays(kernels):
    master, zero = torch.linspace(-2, 2, 1001), torch.zeros(1001)
    m, v, want = zero.clone(), zero.clone(), master * (1 - 1e-2 * 0.1)
    weight = torch.empty(1001, dtype=torch.bfloat16)
    kernels.adamw(master, m, v, zero, weight, 1e-2, 0.9, 0.95, 1e-8, 0.1, 1, 1.0)
    torch.testing.assert_close(master, want, rtol=1e-7, atol=0)
    assert not m.any() and not v.any()
    assert torch.equal(weight, master.to(torch.bfloat16))


# ---- bytes ----


def test_crc32c_matches_known_vectors(kernels):
    # RFC 3720, B.4
    vectors = {
        b"123456789": 0xE3069283,
        b"": 0,
        bytes(32): 0x8A9136AA,
        b"\xff" * 32: 0x62A8AB43,
        bytes(range(32)): 0x46DD794E,
        bytes(range(31, -1, -1)): 0x113FDB5C,
    }
    for data, want in vectors.items():
        assert kernels.crc32c(data) == want


def test_crc32c_of_all_ways_to_cut_and_store_a_buffer_agree(kernels, rng):
    data = integers(rng, 0, 256, 100_003, torch.uint8).numpy()
    reference = TorchKernels(1).crc32c(data)
    for view in (data, data.tobytes(), memoryview(data), bytearray(data)):
        assert kernels.crc32c(view) == reference
    for cut in (0, 1, 7, 768, 24_576, 100_002):
        assert kernels.crc32c(data[cut:], kernels.crc32c(data[:cut])) == reference
        assert kernels.crc32c_address(data.ctypes.data, cut) == TorchKernels(1).crc32c(data[:cut])
    flipped = data.copy()
    flipped[50_000] ^= 1
    assert kernels.crc32c(flipped) != reference


def test_crc32c_by_all_threads_is_that_of_one(kernels, rng):
    data = integers(rng, 0, 256, 700_001, torch.uint8).numpy()
    for size in (0, 1, 4096, 131_071, 131_072, 131_073, 262_144, 393_217, 700_001):
        assert kernels.crc32c_wide(data[:size]) == TorchKernels(1).crc32c(data[:size]), size


def test_fill_sets_exactly_the_bytes_asked_for(kernels):
    data = np.zeros(1000, dtype=np.uint8)
    kernels.fill(data.ctypes.data + 3, 900, 0xFF)
    assert data[3:903].min() == 255 and not data[:3].any() and not data[903:].any()
    with pytest.raises(ValueError, match="byte is 256"):
        kernels.fill(data.ctypes.data, 1, 256)


# ---- refusals ----

REFUSED = (
    (
        "positions",
        lambda k: k.rope(F(2, 4), F(3, 2), F(3, 2), torch.tensor([0, 3], dtype=torch.int32), 4, False),
    ),
    (
        "positions",
        lambda k: k.rope(F(2, 4), F(3, 2), F(3, 2), torch.tensor([-1, 0], dtype=torch.int32), 4, False),
    ),
    (
        "head_dim",
        lambda k: k.rope(F(2, 9), F(3, 2), F(3, 2), torch.tensor([0, 0], dtype=torch.int32), 3, False),
    ),
    (
        "head_dim",
        lambda k: k.rope(F(2, 9), F(3, 2), F(3, 2), torch.tensor([0, 0], dtype=torch.int32), 4, False),
    ),
    ("targets", lambda k: k.cross_entropy(F(2, 4), torch.tensor([0, 4]), 1.0, F(2), False)),
    ("targets", lambda k: k.cross_entropy(F(2, 4), torch.tensor([-1, 0]), 1.0, F(2), True)),
    ("ids", lambda k: k.embedding(F(3, 4), torch.tensor([3]), F(1, 4))),
    ("ids", lambda k: k.embedding_backward(F(1, 4), torch.tensor([-1]), F(3, 4), True)),
    ("not contiguous", lambda k: k.activate(F(4, 3).T, F(3, 4), F(3, 4), "silu")),
    ("out has shape", lambda k: k.activate(F(3, 4), F(3, 4), F(4, 3), "silu")),
    ("rstd is float64", lambda k: k.rmsnorm(F(2, 3), F(3), EPS, F(2, 3), F(2).double())),
    ("weight has shape", lambda k: k.rmsnorm(F(2, 3), F(2), EPS, F(2, 3), F(2))),
    ("dst is bfloat16", lambda k: k.accumulate(F(3).bfloat16(), F(3).bfloat16(), True)),
    ("dst has 2 elements", lambda k: k.cast(F(2), F(3))),
    ("grad is float64", lambda k: k.adamw(F(2), F(2), F(2), F(2).double(), None, *ADAMW.values())),
    ("step is 0", lambda k: k.adamw(F(2), F(2), F(2), F(2), None, 1e-3, 0.9, 0.9, 1e-8, 0.0, 0, 1.0)),
    ("columns has 4", lambda k: k.adalomo(F(6), F(1), F(4), F(6), None, *ADALOMO.values())),
    ("rows has shape", lambda k: k.adalomo(F(6), F(2), F(2), F(6), None, *ADALOMO.values())),
    ("grad has 3 elements", lambda k: k.sgd(F(2), F(3), None, 1e-3, 0.0, 1.0)),
    ("chosen", lambda k: k.dispatch(INT(2, 1) + 3, LONG(2), LONG(2), LONG(4))),
    ("chosen", lambda k: k.route_backward(F(1, 3), INT(1, 1) - 1, F(1, 1), F(3), False, F(1, 3))),
    ("3 of 2 experts", lambda k: k.route(F(1, 2), False, INT(1, 3), F(1, 3), F(2))),
    ("pairs", lambda k: k.weigh(F(1, 4), F(2), LONG(1) + 2)),
    ("kind is 'relu'", lambda k: k.activate(F(3), F(3), F(3), "relu")),
    ("up and dup", lambda k: k.activate_backward(F(3), F(3), F(3), F(3), None, "silu")),
    ("cap is 0", lambda k: k.softcap(F(3), 1.0, 0.0)),
    ("y has shape", lambda k: k.softcap_backward(F(3), F(2), 1.0, 5.0)),
    ("mean has shape", lambda k: k.layernorm(F(2, 3), F(3), F(3), EPS, F(2, 3), F(3), F(2))),
    ("bias has shape", lambda k: k.layernorm(F(2, 3), F(3), F(2), EPS, F(2, 3), F(2), F(2))),
    ("out has shape", lambda k: k.column_sums(F(2, 3), F(2), True)),
    ("window is 0", lambda k: k.causal_softmax(F(1, 2, 2), 0, 1.0, F(1, 2), 0)),
    ("window is 2", lambda k: k.causal_softmax(F(1, 2, 2), 2, 1.0, F(1, 2), 2)),
    ("offset is -1", lambda k: k.causal_softmax(F(1, 2, 2), -1, 1.0, F(1, 2))),
)


def F(*shape: int) -> torch.Tensor:
    return torch.zeros(shape)


def INT(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32)


def LONG(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int64)


@pytest.mark.parametrize(("message", "call"), REFUSED, ids=[f"{i} {r[0]}" for i, r in enumerate(REFUSED)])
def test_what_breaks_the_contract_is_refused_by_name(message, call, kernels):
    with pytest.raises(ValueError, match=message):
        call(kernels)


def test_unknown_builds_and_closed_kernels_are_refused():
    with pytest.raises(ValueError, match="threads is 0"):
        load(0)
    if BUILDS:
        with pytest.raises(ValueError, match="this machine runs"):
            load(1, "mmx")
        kernels = load(2)
        kernels.close()
        kernels.close()
        with pytest.raises(ValueError, match="closed"):
            kernels.sum_squares(torch.ones(3))


def test_empty_batches_are_fine(kernels):
    kernels.rmsnorm(F(0, 5), F(5), EPS, F(0, 5), F(0))
    grad = unset(3, 5, dtype=torch.float32)
    kernels.embedding_backward(F(0, 5), torch.empty(0, dtype=torch.int64), grad, True)
    assert not grad.any()
    dweight = unset(5, dtype=torch.float32)
    kernels.rmsnorm_backward(F(0, 5), F(0, 5), F(5), F(0), F(0, 5), dweight, None, True)
    assert not dweight.any()
    kernels.cross_entropy(F(0, 5), torch.empty(0, dtype=torch.int64), 1.0, F(0), True)


def test_calls_from_several_threads_at_once_give_the_same_bits(rng):
    if not BUILDS:
        pytest.skip("the native library is not built")
    kernels = pool(BUILDS[0], 3)
    x = normal(rng, 300_000, dtype=torch.float32)
    want = kernels.sum_squares(x)
    got: list[float] = []
    callers = [
        threading.Thread(target=lambda: got.extend(kernels.sum_squares(x) for _ in range(50)))
        for _ in range(3)
    ]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert got == [want] * 150
