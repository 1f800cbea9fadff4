"""The table of test_kernels: per method its inputs, its call and its formula in float64.

Inputs are random; outputs start as 0xFF bytes, as the engine hands memory out in test mode, so
a kernel that reads what it should only write gives NaN.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch

Tensors = dict[str, torch.Tensor]

DTYPES = (torch.float32, torch.bfloat16, torch.float64)


def wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def normal(rng: torch.Generator, *shape: int, dtype: torch.dtype, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(shape, generator=rng, dtype=torch.float64) * scale).to(dtype)


def unset(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Memory as the engine hands it out in test mode: every byte 0xFF, which is NaN."""
    return torch.full(shape, -1, dtype=torch.int8).repeat_interleave(dtype.itemsize, -1).view(dtype)


def integers(
    rng: torch.Generator, low: int, high: int, n: int, dtype: torch.dtype = torch.int64
) -> torch.Tensor:
    return torch.randint(low, high, (n,), generator=rng).to(dtype)


@dataclass(frozen=True)
class Case:
    """One method: inputs and unset outputs by name, the call, and its formula in float64."""

    name: str
    sizes: tuple[tuple[int, ...], ...]
    make: Callable[[torch.Generator, torch.dtype, tuple[int, ...]], Tensors]
    call: Callable[[Any, Tensors], None]
    formula: Callable[[Tensors], Tensors]
    terms: float = 0.0
    """Size of the terms an output is the difference of, where they may cancel."""

    def run(self, kernels: Any, tensors: Tensors) -> Tensors:
        """The whole state after the call, so that writes beyond the outputs are seen."""
        copies = {name: tensor.clone() for name, tensor in tensors.items()}
        self.call(kernels, copies)
        return copies


FLAT = ((1,), (7,), (17,), (1000,), (65537,))
MATRIX = ((1, 1), (3, 7), (17, 17), (5, 1000), (600, 65), (1, 65537))
EPS = 1e-5
CAP = 30.0


def make_rmsnorm(rng, dtype, size):
    n, h = size
    return {
        "x": normal(rng, n, h, dtype=dtype, scale=3),
        "weight": normal(rng, h, dtype=dtype),
        "out": unset(n, h, dtype=dtype),
        "rstd": unset(n, dtype=wide(dtype)),
    }


def formula_rmsnorm(offset: float):
    def formula(t):
        rstd = 1 / torch.sqrt(t["x"].square().mean(1) + EPS)
        return {"rstd": rstd, "out": t["x"] * rstd[:, None] * (offset + t["weight"])}

    return formula


def make_rmsnorm_backward(residual: bool, first: bool):
    def make(rng, dtype, size):
        n, h = size
        t = {name: normal(rng, n, h, dtype=dtype) for name in ("dy", "x")}
        t["weight"] = normal(rng, h, dtype=dtype)
        t["rstd"] = (1 / torch.sqrt(t["x"].double().square().mean(1) + EPS)).to(wide(dtype))
        t["dx"] = unset(n, h, dtype=dtype)
        t["dweight"] = unset(h, dtype=wide(dtype)) if first else normal(rng, h, dtype=wide(dtype))
        if residual:
            t["residual"] = normal(rng, n, h, dtype=dtype)
        return t

    return make


def call_rmsnorm_backward(first: bool, offset: float = 0.0):
    def call(k, t):
        k.rmsnorm_backward(
            t["dy"], t["x"], t["weight"], t["rstd"], t["dx"], t["dweight"], t.get("residual"), first, offset
        )

    return call


def formula_rmsnorm_backward(first: bool, offset: float):
    def formula(t):
        """Autograd through the forward's formula, at the saved rstd's precision."""
        x, weight = t["x"].clone().requires_grad_(), t["weight"].clone().requires_grad_()
        (x / torch.sqrt(x.square().mean(1, keepdim=True) + EPS) * (offset + weight)).backward(t["dy"])
        assert x.grad is not None and weight.grad is not None
        return {
            "dx": x.grad + t.get("residual", torch.zeros(1)),
            "dweight": weight.grad + (0 if first else t["dweight"]),
        }

    return formula


def make_layernorm(rng, dtype, size):
    n, h = size
    return {
        "x": normal(rng, n, h, dtype=dtype, scale=3) + 1,
        "weight": normal(rng, h, dtype=dtype),
        "bias": normal(rng, h, dtype=dtype),
        "out": unset(n, h, dtype=dtype),
        "mean": unset(n, dtype=wide(dtype)),
        "rstd": unset(n, dtype=wide(dtype)),
    }


def formula_layernorm(t):
    mean = t["x"].mean(1)
    rstd = 1 / torch.sqrt(t["x"].var(1, correction=0) + EPS)
    out = (t["x"] - mean[:, None]) * rstd[:, None] * t["weight"] + t["bias"]
    return {"mean": mean, "rstd": rstd, "out": out}


def make_layernorm_backward(residual: bool, first: bool):
    def make(rng, dtype, size):
        t = make_rmsnorm_backward(residual, first)(rng, dtype, size)
        x = t["x"].double()
        t["mean"] = x.mean(1).to(wide(dtype))
        t["rstd"] = (1 / torch.sqrt(x.var(1, correction=0) + EPS)).to(wide(dtype))
        return t

    return make


def call_layernorm_backward(first: bool):
    def call(k, t):
        inputs = (t["dy"], t["x"], t["weight"], t["mean"], t["rstd"])
        k.layernorm_backward(*inputs, t["dx"], t["dweight"], t.get("residual"), first)

    return call


def formula_layernorm_backward(first: bool):
    def formula(t):
        """Autograd through torch's layer norm."""
        x, weight = t["x"].clone().requires_grad_(), t["weight"].clone().requires_grad_()
        torch.nn.functional.layer_norm(x, x.shape[1:], weight, None, EPS).backward(t["dy"])
        assert x.grad is not None and weight.grad is not None
        return {
            "dx": x.grad + t.get("residual", torch.zeros(1)),
            "dweight": weight.grad + (0 if first else t["dweight"]),
        }

    return formula


def make_column_sums(first: bool):
    def make(rng, dtype, size):
        n, h = size
        g = wide(dtype)
        out = unset(h, dtype=g) if first else normal(rng, h, dtype=g)
        return {"x": normal(rng, n, h, dtype=dtype), "out": out}

    return make


def make_rope(rng, dtype, size):
    n, heads, dim, *turned = size
    angle = normal(rng, 50, (turned or [dim])[0] // 2, dtype=torch.float64)
    return {
        "x": normal(rng, n, heads * dim, dtype=dtype),
        "cos": angle.cos().to(wide(dtype)),
        "sin": angle.sin().to(wide(dtype)),
        "positions": integers(rng, 0, 50, n, torch.int32),
        "dim": torch.tensor(dim),
    }


def formula_rope(inverse: bool):
    def formula(t):
        """Hugging Face Llama: x * cos + rotate_half(x) * sin."""
        x = t["x"].view(len(t["positions"]), -1, int(t["dim"]))
        at = t["positions"].long()
        cos, sin = (torch.cat((t[name][at],) * 2, -1)[:, None] for name in ("cos", "sin"))
        x, rest = x.split((cos.shape[-1], x.shape[-1] - cos.shape[-1]), -1)
        low, high = x.chunk(2, -1)
        turned = torch.cat((-high, low), -1)
        x = x * cos + turned * (-sin if inverse else sin)
        return {"x": torch.cat((x, rest), -1).flatten(1)}

    return formula


ACTIVATED = {
    "silu": torch.nn.functional.silu,
    "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
}


def make_activate(gated: bool):
    def make(rng, dtype, size):
        t = {"gate": normal(rng, *size, dtype=dtype, scale=4), "out": unset(*size, dtype=dtype)}
        return t | ({"up": normal(rng, *size, dtype=dtype)} if gated else {})

    return make


def formula_activate(kind: str):
    return lambda t: {"out": ACTIVATED[kind](t["gate"]) * t.get("up", 1)}


def make_activate_backward(gated: bool):
    def make(rng, dtype, size):
        names = ("da", "gate", "up") if gated else ("da", "gate")
        t = {name: normal(rng, *size, dtype=dtype, scale=2) for name in names}
        return t | {f"d{name}": unset(*size, dtype=dtype) for name in names[1:]}

    return make


def call_activate_backward(kind: str):
    return lambda k, t: k.activate_backward(t["da"], t["gate"], t.get("up"), t["dgate"], t.get("dup"), kind)


def formula_activate_backward(kind: str):
    def formula(t):
        gate, up = t["gate"].clone().requires_grad_(), t.get("up", torch.ones(1)).clone().requires_grad_()
        (ACTIVATED[kind](gate) * up).backward(t["da"])
        return {"dgate": gate.grad} | ({"dup": up.grad} if "up" in t else {})

    return formula


def make_softcap(rng, dtype, size):
    x = normal(rng, *size, dtype=dtype, scale=40)
    x[::3] /= 1000
    return {"x": x}


def make_softcap_backward(rng, dtype, size):
    return {
        "dy": normal(rng, *size, dtype=dtype),
        "y": (torch.tanh(normal(rng, *size, dtype=torch.float64)) * CAP).to(dtype),
    }


def make_cross_entropy(rng, dtype, size):
    chunk, vocab = size
    targets = integers(rng, 0, vocab, chunk)
    targets[1::3] = -100
    logits = normal(rng, chunk, vocab, dtype=torch.float64, scale=3)
    logits[0] = logits[0].sort().values  # every block raises the running maximum
    return {"logits": logits.to(dtype), "targets": targets, "loss": unset(chunk, dtype=wide(dtype))}


def formula_cross_entropy(gradient: bool):
    def formula(t):
        logits = t["logits"].clone().requires_grad_()
        loss = torch.nn.functional.cross_entropy(logits, t["targets"], reduction="none", ignore_index=-100)
        (loss.sum() * 0.25).backward()
        return {"loss": loss.detach(), "logits": logits.grad if gradient else t["logits"]}

    return formula


def make_embedding(rng, dtype, size):
    n, h = size
    return {
        "table": normal(rng, 11, h, dtype=dtype),
        "ids": integers(rng, 0, 11, n),
        "out": unset(n, h, dtype=dtype),
    }


def make_embedding_added(rng, dtype, size):
    return make_embedding(rng, dtype, size) | {"out": normal(rng, *size, dtype=dtype)}


def make_embedding_backward(first: bool):
    def make(rng, dtype, size):
        n, h = size
        g = wide(dtype)
        return {
            "dy": normal(rng, n, h, dtype=dtype),
            "ids": integers(rng, 0, 11, n),
            "grad": unset(13, h, dtype=g) if first else normal(rng, 13, h, dtype=g),
        }

    return make


def formula_embedding_backward(first: bool, scale: float):
    def formula(t):
        onehot = torch.nn.functional.one_hot(t["ids"], 13).double()
        return {"grad": onehot.T @ t["dy"] * scale + (0 if first else t["grad"])}

    return formula


def make_accumulate(first: bool, full: bool):
    def make(rng, dtype, size):
        g = wide(dtype)
        dst = unset(*size, dtype=g) if first else normal(rng, *size, dtype=g)
        return {"dst": dst, "src": normal(rng, *size, dtype=g if full else dtype)}

    return make


def make_cast(to: torch.dtype):
    def make(rng, dtype, size):
        return {"src": normal(rng, *size, dtype=dtype, scale=100), "dst": unset(*size, dtype=to)}

    return make


def make_sum_squares(rng, dtype, size):
    return {"x": normal(rng, *size, dtype=dtype, scale=1e3), "total": unset(1, dtype=torch.float64)}


def call_sum_squares(k, t):
    t["total"][0] = k.sum_squares(t["x"])


ADAMW = {
    "lr": 3e-3,
    "beta1": 0.9,
    "beta2": 0.95,
    "eps": 1e-8,
    "weight_decay": 0.1,
    "step": 3,
    "grad_scale": 0.7,
}


def make_adamw(low_grad: bool, weight: bool):
    def make(rng, dtype, size):
        g = wide(dtype)
        t = {name: normal(rng, *size, dtype=g) for name in ("master", "m", "v")}
        t["v"].square_()
        t["grad"] = normal(rng, *size, dtype=dtype if low_grad else g)
        if weight:
            t["weight"] = unset(*size, dtype=dtype)
        return t

    return make


def formula_adamw(t):
    """Loshchilov & Hutter 2019, Algorithm 2."""
    c = ADAMW
    g = t["grad"] * c["grad_scale"]
    m = c["beta1"] * t["m"] + (1 - c["beta1"]) * g
    v = c["beta2"] * t["v"] + (1 - c["beta2"]) * g * g
    mhat, vhat = m / (1 - c["beta1"] ** c["step"]), v / (1 - c["beta2"] ** c["step"])
    p = t["master"] - c["lr"] * (mhat / (vhat.sqrt() + c["eps"]) + c["weight_decay"] * t["master"])
    return {"master": p, "m": m, "v": v} | ({"weight": p} if "weight" in t else {})


ADALOMO = {
    "lr": 3e-2,
    "decay": 0.6,
    "eps": 1e-30,
    "least": 1e-3,
    "most": 1.0,
    "weight_decay": 0.1,
    "grad_scale": 0.7,
}


def make_adalomo(low_grad: bool, weight: bool):
    """Of a matrix where the size has two numbers."""

    def make(rng, dtype, size):
        t = {"master": normal(rng, *size, dtype=wide(dtype))}
        t["grad"] = normal(rng, *size, dtype=dtype if low_grad else wide(dtype))
        t["rows"] = normal(rng, size[0], dtype=wide(dtype)).square() + 0.1
        if len(size) == 2:
            t["columns"] = normal(rng, size[1], dtype=wide(dtype)).square() + 0.1
        return t | ({"weight": unset(*size, dtype=dtype)} if weight else {})

    return make


def formula_adalomo(t):
    """Lv et al. 2024, algorithm 1."""
    c = ADALOMO
    g = t["grad"] * c["grad_scale"]
    square = g * g + c["eps"]
    if "columns" not in t:
        found = {"rows": c["decay"] * t["rows"] + (1 - c["decay"]) * square}
        u = g / found["rows"].sqrt()
    else:
        found = {
            "rows": c["decay"] * t["rows"] + (1 - c["decay"]) * square.mean(1),
            "columns": c["decay"] * t["columns"] + (1 - c["decay"]) * square.mean(0),
        }
        u = g / torch.sqrt(torch.outer(found["rows"], found["columns"]) / found["rows"].mean())
    rate = c["lr"] * max(c["least"], float(t["master"].square().mean().sqrt()))
    u = u / max(1.0, float(u.square().mean().sqrt()) / c["most"])
    p = t["master"] - rate * (u + c["weight_decay"] * t["master"])
    return {"master": p, **found} | ({"weight": p} if "weight" in t else {})


def make_sgd(low_grad: bool, weight: bool):
    def make(rng, dtype, size):
        t = {"master": normal(rng, *size, dtype=wide(dtype))}
        t["grad"] = normal(rng, *size, dtype=dtype if low_grad else wide(dtype))
        return t | ({"weight": unset(*size, dtype=dtype)} if weight else {})

    return make


def formula_sgd(t):
    """Gradient descent with decoupled decay: learning rate 3e-3, decay 0.1, gradients times 0.7."""
    p = t["master"] - 3e-3 * (0.7 * t["grad"] + 0.1 * t["master"])
    return {"master": p} | ({"weight": p} if "weight" in t else {})


def make_causal_softmax(rng, dtype, size):
    batch, n, m, offset, *window = size
    scores = normal(rng, batch, n, m, dtype=dtype, scale=5)
    t = {
        "scores": scores,
        "offset": torch.tensor(offset),
        "window": torch.tensor(window or n + offset),
        "lse": unset(batch, n, dtype=wide(dtype)),
    }
    scores[:, ~seen(t)] = math.nan  # a matmul may leave anything there
    return t


def seen(t):
    """Which columns each row sees: [n, m]."""
    n, m = t["scores"].shape[1:]
    last = torch.arange(n)[:, None] + t["offset"]
    columns = torch.arange(m)
    return (columns <= last) & (columns > last - t["window"])


def call_causal_softmax(k, t):
    offset, window = int(t["offset"]), int(t["window"])
    everything = t["scores"].shape[1] + offset
    k.causal_softmax(t["scores"], offset, 0.3, t["lse"], None if window == everything else window)


def formula_causal_softmax(t):
    power = torch.where(seen(t), torch.exp(t["scores"] * 0.3), 0.0)
    return {"scores": power / power.sum(2, keepdim=True), "lse": power.sum(2).log()}


def make_causal_softmax_backward(rng, dtype, size):
    batch, n, m, *_ = size
    return {
        "p": normal(rng, batch, n, m, dtype=torch.float64).softmax(2).to(dtype),
        "dp": normal(rng, batch, n, m, dtype=dtype),
        "delta": normal(rng, batch, n, dtype=wide(dtype)),
    }


def make_route(rng, dtype, size):
    n, experts, k = size
    return {
        "logits": normal(rng, n, experts, dtype=dtype, scale=2),
        "chosen": torch.full((n, k), -1, dtype=torch.int32),
        "share": unset(n, k, dtype=wide(dtype)),
        "mass": unset(experts, dtype=wide(dtype)),
    }


def best_of(logits, k):
    """The k largest of each row, largest first, of equal ones the first."""
    rows = [sorted(range(len(row)), key=lambda e: -row[e])[:k] for row in logits.tolist()]
    return torch.tensor(rows, dtype=torch.int64).view(len(logits), k)


def shares(logits, chosen, renormalize):
    p = torch.exp(logits) / torch.exp(logits).sum(1, keepdim=True)
    kept = torch.stack([p[row, picks] for row, picks in enumerate(chosen)])
    return p, kept / kept.sum(1, keepdim=True) if renormalize else kept


def formula_route(renormalize: bool):
    def formula(t):
        chosen = best_of(t["logits"], t["chosen"].shape[1])
        p, share = shares(t["logits"], chosen, renormalize)
        return {"chosen": chosen.int(), "share": share, "mass": p.sum(0)}

    return formula


def make_route_backward(rng, dtype, size):
    n, experts, k = size
    logits = normal(rng, n, experts, dtype=dtype, scale=2)
    return {
        "logits": logits,
        "chosen": best_of(logits.double(), k).int(),
        "dshare": normal(rng, n, k, dtype=wide(dtype)),
        "balance": normal(rng, experts, dtype=wide(dtype), scale=0.1),
        "dlogits": unset(n, experts, dtype=dtype),
    }


def formula_route_backward(renormalize: bool):
    def formula(t):
        """Autograd through the forward's formula, for a loss that is linear in shares and mass."""
        logits = t["logits"].clone().requires_grad_()
        p, share = shares(logits, t["chosen"].long(), renormalize)
        ((share * t["dshare"]).sum() + (p.sum(0) * t["balance"]).sum()).backward()
        return {"dlogits": logits.grad}

    return formula


def make_dispatch(rng, dtype, size):
    n, experts, k = size
    logits = torch.rand(n, experts, generator=rng) + torch.arange(experts) * 0.1  # skewed
    return {
        "chosen": best_of(logits, k).int(),
        "pairs": torch.full((n * k,), -1),
        "tokens": torch.full((n * k,), -1),
        "offsets": torch.full((experts + 1,), -1),
    }


def formula_dispatch(t):
    k = t["chosen"].shape[1]
    flat = t["chosen"].flatten().tolist()
    experts = len(t["offsets"]) - 1
    pairs = [i for e in range(experts) for i, expert in enumerate(flat) if expert == e]
    starts = [sum(expert < e for expert in flat) for e in range(experts + 1)]
    return {
        "pairs": torch.tensor(pairs),
        "tokens": torch.tensor([i // k for i in pairs]),
        "offsets": torch.tensor(starts),
    }


def make_weigh(rng, dtype, size):
    n, width = size
    return {
        "x": normal(rng, n, width, dtype=dtype),
        "share": normal(rng, 2 * n, dtype=wide(dtype)),
        "pairs": torch.randperm(2 * n, generator=rng)[:n],
    }


def make_weigh_backward(rng, dtype, size):
    t = make_weigh(rng, dtype, size)
    return {**t, "dy": normal(rng, *size, dtype=dtype), "dshare": normal(rng, 2 * size[0], dtype=wide(dtype))}


def formula_weigh_backward(t):
    factor, dshare = t["share"][t["pairs"]][:, None], t["dshare"].clone()
    dshare[t["pairs"]] = (t["dy"] * t["x"]).sum(1)
    return {"dshare": dshare, "dy": t["dy"] * factor, "x": t["x"] * factor}


ROUTES = ((1, 1, 1), (3, 4, 2), (17, 8, 2), (600, 60, 4), (70, 128, 8), (5, 1024, 1024))
ROPE = ((1, 1, 2), (3, 7, 6), (17, 3, 64), (700, 3, 34), (60, 9, 128), (50, 3, 96, 64), (9, 2, 7, 2))
"""(N, heads, D), or (N, heads, D, dimensions that turn)."""
ATTENTION = (
    (1, 1, 1, 0),
    (3, 7, 7, 0),
    (2, 17, 17, 3),
    (4, 5, 1000, 995),
    (2, 170, 170, 0),
    (1, 3, 5000, 4000),
    (3, 7, 7, 0, 1),
    (2, 17, 20, 3, 5),
    (1, 130, 400, 270, 271),
    (1, 4, 5000, 4000, 2500),
)
"""(B, n, m, offset), or (B, n, m, offset, window)."""

CASES = (
    *(
        Case(
            f"rmsnorm{'+offset' * bool(offset)}",
            MATRIX,
            make_rmsnorm,
            lambda k, t, offset=offset: k.rmsnorm(t["x"], t["weight"], EPS, t["out"], t["rstd"], offset),
            formula_rmsnorm(offset),
        )
        for offset in (0.0, 1.0)
    ),
    *(
        Case(
            f"rmsnorm_backward{'+residual' * residual}{'+first' * first}{'+offset' * bool(offset)}",
            MATRIX,
            make_rmsnorm_backward(residual, first),
            call_rmsnorm_backward(first, offset),
            formula_rmsnorm_backward(first, offset),
            terms=1.0,
        )
        for residual, first, offset in ((False, True, 0.0), (True, False, 0.0), (True, True, 1.0))
    ),
    Case(
        "layernorm",
        MATRIX,
        make_layernorm,
        lambda k, t: k.layernorm(t["x"], t["weight"], t["bias"], EPS, t["out"], t["mean"], t["rstd"]),
        formula_layernorm,
        terms=10.0,
    ),
    *(
        Case(
            f"layernorm_backward{'+residual' * residual}{'+first' * first}",
            MATRIX[1:],
            make_layernorm_backward(residual, first),
            call_layernorm_backward(first),
            formula_layernorm_backward(first),
            terms=1.0,
        )
        for residual, first in ((False, True), (True, False))
    ),
    *(
        Case(
            f"column_sums{'+first' * first}",
            MATRIX,
            make_column_sums(first),
            lambda k, t, first=first: k.column_sums(t["x"], t["out"], first),
            lambda t, first=first: {"out": t["x"].sum(0) + (0 if first else t["out"])},
            terms=1.0,
        )
        for first in (False, True)
    ),
    *(
        Case(
            f"rope{'+inverse' * inverse}",
            ROPE,
            make_rope,
            lambda k, t, inverse=inverse: k.rope(
                t["x"], t["cos"], t["sin"], t["positions"], int(t["dim"]), inverse
            ),
            formula_rope(inverse),
        )
        for inverse in (False, True)
    ),
    *(
        Case(
            f"activate {kind}{'+gated' * gated}",
            FLAT,
            make_activate(gated),
            lambda k, t, kind=kind: k.activate(t["gate"], t.get("up"), t["out"], kind),
            formula_activate(kind),
            terms=1.0,  # gelu_tanh: x (1 + tanh) far below 0
        )
        for kind in ACTIVATED
        for gated in (True, False)
    ),
    *(
        Case(
            f"activate_backward {kind}{'+gated' * gated}",
            FLAT,
            make_activate_backward(gated),
            call_activate_backward(kind),
            formula_activate_backward(kind),
            terms=1.0,  # far below 0 a derivative is the difference of such terms
        )
        for kind in ACTIVATED
        for gated in (True, False)
    ),
    Case(
        "softcap",
        FLAT,
        make_softcap,
        lambda k, t: k.softcap(t["x"], 0.7, CAP),
        lambda t: {"x": CAP * torch.tanh(t["x"] * 0.7 / CAP)},
    ),
    Case(
        "softcap_backward",
        FLAT,
        make_softcap_backward,
        lambda k, t: k.softcap_backward(t["dy"], t["y"], 0.7, CAP),
        lambda t: {"dy": t["dy"] * (1 - (t["y"] / CAP) ** 2) * 0.7},
        terms=5.0,
    ),
    *(
        Case(
            f"cross_entropy{'+gradient' * gradient}",
            ((1, 1), (3, 7), (7, 17), (5, 1000), (20, 4099), (1, 65537)),
            make_cross_entropy,
            lambda k, t, gradient=gradient: k.cross_entropy(
                t["logits"], t["targets"], 0.25, t["loss"], gradient
            ),
            formula_cross_entropy(gradient),
        )
        for gradient in (False, True)
    ),
    *(
        Case(
            f"embedding{f'*{scale}' * (scale != 1)}",
            MATRIX,
            make_embedding,
            lambda k, t, scale=scale: k.embedding(t["table"], t["ids"], t["out"], scale),
            lambda t, scale=scale: {"out": t["table"][t["ids"]] * scale},
        )
        for scale in (1.0, 7.25)
    ),
    Case(
        "embedding+add",
        MATRIX,
        make_embedding_added,
        lambda k, t: k.embedding(t["table"], t["ids"], t["out"], add=True),
        lambda t: {"out": t["out"] + t["table"][t["ids"]]},
    ),
    *(
        Case(
            f"embedding_backward{'+first' * first}{f'*{scale}' * (scale != 1)}",
            MATRIX,
            make_embedding_backward(first),
            lambda k, t, first=first, scale=scale: k.embedding_backward(
                t["dy"], t["ids"], t["grad"], first, scale
            ),
            formula_embedding_backward(first, scale),
        )
        for first, scale in ((False, 1.0), (True, 1.0), (True, 7.25))
    ),
    *(
        Case(
            f"accumulate{'+first' * first}{'+full' * full}",
            FLAT,
            make_accumulate(first, full),
            lambda k, t, first=first: k.accumulate(t["dst"], t["src"], first),
            lambda t, first=first: {"dst": t["src"] + (0 if first else t["dst"])},
        )
        for first, full in ((True, False), (False, False), (False, True))
    ),
    *(
        Case(
            f"cast to {str(to)[6:]}",
            FLAT,
            make_cast(to),
            lambda k, t: k.cast(t["dst"], t["src"]),
            lambda t: {"dst": t["src"]},
        )
        for to in DTYPES
    ),
    Case(
        "sum_squares",
        (*FLAT, (200_003,)),
        make_sum_squares,
        call_sum_squares,
        lambda t: {"total": torch.tensor([math.fsum(t["x"].square().tolist())], dtype=torch.float64)},
    ),
    *(
        Case(
            f"adamw{'+low gradient' * low}{'+weight' * weight}",
            FLAT,
            make_adamw(low, weight),
            lambda k, t: k.adamw(t["master"], t["m"], t["v"], t["grad"], t.get("weight"), *ADAMW.values()),
            formula_adamw,
        )
        for low, weight in ((False, False), (False, True), (True, False), (True, True))
    ),
    *(
        Case(
            f"adalomo{'+low gradient' * low}{'+weight' * weight}{'+vector' * vector}",
            FLAT if vector else MATRIX,
            make_adalomo(low, weight),
            lambda k, t: k.adalomo(
                t["master"], t["rows"], t.get("columns"), t["grad"], t.get("weight"), *ADALOMO.values()
            ),
            formula_adalomo,
        )
        for low, weight, vector in product((False, True), repeat=3)
    ),
    *(
        Case(
            f"sgd{'+low gradient' * low}{'+weight' * weight}",
            FLAT,
            make_sgd(low, weight),
            lambda k, t: k.sgd(t["master"], t["grad"], t.get("weight"), 3e-3, 0.1, 0.7),
            formula_sgd,
        )
        for low, weight in ((False, False), (False, True), (True, False), (True, True))
    ),
    Case(
        "causal_softmax",
        ATTENTION,
        make_causal_softmax,
        call_causal_softmax,
        formula_causal_softmax,
    ),
    Case(
        "causal_softmax_backward",
        ATTENTION,
        make_causal_softmax_backward,
        lambda k, t: k.causal_softmax_backward(t["p"], t["dp"], t["delta"], 0.3),
        lambda t: {"dp": t["p"] * (t["dp"] - t["delta"][:, :, None]) * 0.3},
    ),
    *(
        Case(
            f"route{'+renormalize' * renormalize}",
            ROUTES,
            make_route,
            lambda k, t, renormalize=renormalize: k.route(
                t["logits"], renormalize, t["chosen"], t["share"], t["mass"]
            ),
            formula_route(renormalize),
        )
        for renormalize in (False, True)
    ),
    *(
        Case(
            f"route_backward{'+renormalize' * renormalize}",
            ROUTES,
            make_route_backward,
            lambda k, t, renormalize=renormalize: k.route_backward(
                t["logits"], t["chosen"], t["dshare"], t["balance"], renormalize, t["dlogits"]
            ),
            formula_route_backward(renormalize),
            terms=1.0,
        )
        for renormalize in (False, True)
    ),
    Case(
        "dispatch",
        ((1, 1, 1), (3, 4, 2), (100, 8, 2), (70, 128, 8), (5, 1024, 3)),
        make_dispatch,
        lambda k, t: k.dispatch(t["chosen"], t["pairs"], t["tokens"], t["offsets"]),
        formula_dispatch,
    ),
    Case(
        "weigh",
        MATRIX,
        make_weigh,
        lambda k, t: k.weigh(t["x"], t["share"], t["pairs"]),
        lambda t: {"x": t["x"] * t["share"][t["pairs"]][:, None]},
    ),
    Case(
        "weigh_backward",
        MATRIX,
        make_weigh_backward,
        lambda k, t: k.weigh_backward(t["dy"], t["x"], t["share"], t["pairs"], t["dshare"]),
        formula_weigh_backward,
        terms=1.0,
    ),
)
