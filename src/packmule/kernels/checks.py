"""The contract of every kernel method as checks, shared by both families. No torch import.

Each function returns the sizes its kernel needs and raises ValueError naming the tensor.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

COMPUTE = ("float32", "bfloat16", "float64")
STATISTIC = {"float32": "float32", "bfloat16": "float32", "float64": "float64"}
IGNORED = -100
ACTIVATIONS = ("silu", "gelu_tanh")
"""The kinds of `activate`, numbered as in csrc/rows.h."""


def dtype_name(tensor: Tensor) -> str:
    """ "float32" for torch.float32."""
    return str(tensor.dtype)[6:]


def _need(name: str, tensor: Tensor, dtypes: tuple[str, ...], shape: tuple[int, ...] | None = None) -> str:
    dtype = dtype_name(tensor)
    if dtype not in dtypes:
        raise ValueError(f"{name} is {dtype}, expected {' or '.join(dict.fromkeys(dtypes))}")
    if shape is not None and tuple(tensor.shape) != shape:
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}, expected {shape}")
    if not tensor.is_contiguous():
        raise ValueError(f"{name} is not contiguous")
    return dtype


def _matrix(name: str, tensor: Tensor, dimensions: int = 2) -> tuple[str, tuple[int, ...]]:
    dtype = _need(name, tensor, COMPUTE)
    if tensor.dim() != dimensions:
        raise ValueError(f"{name} has {tensor.dim()} dimensions, expected {dimensions}")
    return dtype, tuple(tensor.shape)


def rmsnorm(x: Tensor, weight: Tensor, out: Tensor, rstd: Tensor) -> tuple[int, int]:
    """(N, H)."""
    c, (n, h) = _matrix("x", x)
    _need("weight", weight, (c,), (h,))
    _need("out", out, (c,), (n, h))
    _need("rstd", rstd, (STATISTIC[c],), (n,))
    return n, h


def rmsnorm_backward(
    dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, dx: Tensor, dweight: Tensor, residual: Tensor | None
) -> tuple[int, int]:
    """(N, H)."""
    n, h = rmsnorm(x, weight, dx, rstd)
    c = dtype_name(x)
    _need("dy", dy, (c,), (n, h))
    _need("dweight", dweight, (STATISTIC[c],), (h,))
    if residual is not None:
        _need("residual", residual, (c,), (n, h))
    return n, h


def layernorm(
    x: Tensor, weight: Tensor, bias: Tensor, out: Tensor, mean: Tensor, rstd: Tensor
) -> tuple[int, int]:
    """(N, H)."""
    n, h = rmsnorm(x, weight, out, rstd)
    c = dtype_name(x)
    _need("bias", bias, (c,), (h,))
    _need("mean", mean, (STATISTIC[c],), (n,))
    return n, h


def layernorm_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    mean: Tensor,
    rstd: Tensor,
    dx: Tensor,
    dweight: Tensor,
    residual: Tensor | None,
) -> tuple[int, int]:
    """(N, H)."""
    n, h = rmsnorm_backward(dy, x, weight, rstd, dx, dweight, residual)
    _need("mean", mean, (STATISTIC[dtype_name(x)],), (n,))
    return n, h


def column_sums(x: Tensor, out: Tensor) -> tuple[int, int]:
    """(N, H)."""
    c, (n, h) = _matrix("x", x)
    _need("out", out, (STATISTIC[c],), (h,))
    return n, h


def rope(
    x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, head_dim: int
) -> tuple[int, int, int, int, int]:
    """(N, heads, D, R, P)."""
    c, (n, width) = _matrix("x", x)
    if head_dim <= 0 or width % head_dim:
        raise ValueError(f"head_dim is {head_dim}, expected a divisor of x's width {width}")
    rows, half = (int(size) for size in cos.shape) if cos.dim() == 2 else (0, 0)
    _need("cos", cos, (STATISTIC[c],), (rows, half))
    if 2 * half > head_dim:
        raise ValueError(f"head_dim is {head_dim}, expected at least twice the {half} columns of cos")
    _need("sin", sin, (STATISTIC[c],), (rows, half))
    _need("positions", positions, ("int32",), (n,))
    return n, width // head_dim, head_dim, half, rows


def activation(kind: str, gate: Tensor, up: Tensor | None, **others: Tensor | None) -> tuple[int, int]:
    """(number of the kind, elements). What goes with `up` is given where `up` is."""
    if kind not in ACTIVATIONS:
        raise ValueError(f"kind is {kind!r}, expected {' or '.join(ACTIVATIONS)}")
    dup = others.pop("dup", up)
    if (up is None) != (dup is None):
        raise ValueError("up and dup go together")
    given = {"gate": gate, "up": up, "dup": dup, **others}
    return ACTIVATIONS.index(kind), same(**{name: t for name, t in given.items() if t is not None})


def softcap(x: Tensor, scale: float, cap: float, y: Tensor | None = None) -> int:
    """Elements."""
    if not (scale > 0 and cap > 0):
        raise ValueError(f"scale is {scale} and cap is {cap}, expected numbers above 0")
    return same(x=x) if y is None else same(dy=x, y=y)


def same(**tensors: Tensor) -> int:
    """Number of elements of tensors that share one compute dtype and one shape."""
    (first, lead), *others = tensors.items()
    c = _need(first, lead, COMPUTE)
    for name, tensor in others:
        _need(name, tensor, (c,), tuple(lead.shape))
    return lead.numel()


def cross_entropy(logits: Tensor, targets: Tensor, loss: Tensor) -> tuple[int, int]:
    """(C, V)."""
    c, (chunk, vocab) = _matrix("logits", logits)
    _need("targets", targets, ("int64",), (chunk,))
    _need("loss", loss, (STATISTIC[c],), (chunk,))
    return chunk, vocab


def embedding(table: Tensor, ids: Tensor, out: Tensor) -> tuple[int, int, int]:
    """(N, V, H)."""
    c, (vocab, h) = _matrix("table", table)
    n = ids.numel()
    _need("ids", ids, ("int64",), (n,))
    _need("out", out, (c,), (n, h))
    return n, vocab, h


def embedding_backward(dy: Tensor, ids: Tensor, grad: Tensor) -> tuple[int, int, int]:
    """(N, V, H)."""
    c, (n, h) = _matrix("dy", dy)
    _need("ids", ids, ("int64",), (n,))
    _need("grad", grad, (STATISTIC[c],), (int(grad.shape[0]), h))
    return n, int(grad.shape[0]), h


def accumulate(dst: Tensor, src: Tensor) -> int:
    """Elements."""
    c = _need("src", src, COMPUTE)
    _need("dst", dst, (STATISTIC[c],))
    return _as_many("dst", dst, src)


def cast(dst: Tensor, src: Tensor) -> int:
    """Elements."""
    _need("src", src, COMPUTE)
    _need("dst", dst, COMPUTE)
    return _as_many("dst", dst, src)


def _as_many(name: str, tensor: Tensor, like: Tensor) -> int:
    if tensor.numel() != like.numel():
        raise ValueError(f"{name} has {tensor.numel()} elements, expected {like.numel()}")
    return like.numel()


def adamw(master: Tensor, m: Tensor, v: Tensor, grad: Tensor, weight: Tensor | None, step: int) -> int:
    """Elements."""
    count, g = sgd(master, grad, weight), dtype_name(master)
    _need("m", m, (g,), tuple(master.shape))
    _need("v", v, (g,), tuple(master.shape))
    if step < 1:
        raise ValueError(f"step is {step}, expected at least 1")
    return count


def adalomo(
    master: Tensor, rows: Tensor, columns: Tensor | None, grad: Tensor, weight: Tensor | None
) -> tuple[int, int]:
    """(R, C); of a vector (elements, 1)."""
    count, g = sgd(master, grad, weight), dtype_name(master)
    width = 1 if columns is None else columns.numel()
    _need("rows", rows, (g,), (count // max(1, width),))
    if columns is not None:
        _need("columns", columns, (g,), (width,))
    if rows.numel() * width != count:
        raise ValueError(f"columns has {width} elements, expected a divisor of master's {count}")
    return rows.numel(), width


def sgd(master: Tensor, grad: Tensor, weight: Tensor | None) -> int:
    """Elements."""
    g = _need("master", master, ("float32", "float64"))
    low = (g, "bfloat16") if g == "float32" else (g,)
    _need("grad", grad, low)
    _as_many("grad", grad, master)
    if weight is not None:
        _need("weight", weight, low)
        _as_many("weight", weight, master)
    return master.numel()


def causal_softmax(scores: Tensor, offset: int, lse: Tensor, window: int | None) -> tuple[int, int, int]:
    """(B, n, m)."""
    c, (batch, n, m) = _matrix("scores", scores, 3)
    _need("lse", lse, (STATISTIC[c],), (batch, n))
    if offset < 0:
        raise ValueError(f"offset is {offset}, expected at least 0")
    if window is not None and window < max(1, n + offset - m + 1):
        raise ValueError(f"window is {window}: the last of {n} rows would see none of {m} columns")
    return batch, n, m


def causal_softmax_backward(p: Tensor, dp: Tensor, delta: Tensor) -> tuple[int, int, int]:
    """(B, n, m)."""
    c, (batch, n, m) = _matrix("p", p, 3)
    _need("dp", dp, (c,), (batch, n, m))
    _need("delta", delta, (STATISTIC[c],), (batch, n))
    return batch, n, m


MOST_EXPERTS = 1024
"""Probabilities of one token lie on a kernel's stack."""


def route(logits: Tensor, chosen: Tensor, share: Tensor, mass: Tensor) -> tuple[int, int, int]:
    """(N, E, k)."""
    c, (n, experts) = _matrix("logits", logits)
    k = _chosen(chosen, n, experts)
    _need("share", share, (STATISTIC[c],), (n, k))
    _need("mass", mass, (STATISTIC[c],), (experts,))
    return n, experts, k


def route_backward(
    logits: Tensor, chosen: Tensor, dshare: Tensor, balance: Tensor, dlogits: Tensor
) -> tuple[int, int, int]:
    """(N, E, k)."""
    sizes = route(logits, chosen, dshare, balance)
    _need("dlogits", dlogits, (dtype_name(logits),), sizes[:2])
    return sizes


def _chosen(chosen: Tensor, n: int, experts: int) -> int:
    k = int(chosen.shape[-1]) if chosen.dim() == 2 else 0
    _need("chosen", chosen, ("int32",), (n, k))
    if not 1 <= k <= experts <= MOST_EXPERTS:
        raise ValueError(f"{k} of {experts} experts, expected 1 <= k <= E <= {MOST_EXPERTS}")
    return k


def dispatch(chosen: Tensor, pairs: Tensor, tokens: Tensor, offsets: Tensor) -> tuple[int, int, int]:
    """(N, E, k)."""
    n, experts = len(chosen), offsets.numel() - 1
    k = _chosen(chosen, n, experts)
    _need("pairs", pairs, ("int64",), (n * k,))
    _need("tokens", tokens, ("int64",), (n * k,))
    _need("offsets", offsets, ("int64",), (experts + 1,))
    return n, experts, k


def weigh(x: Tensor, share: Tensor, pairs: Tensor) -> tuple[int, int, int]:
    """(n, F, N * k)."""
    c, (n, width) = _matrix("x", x)
    shares = share.numel()
    _need("share", share, (STATISTIC[c],), (shares,))
    _need("pairs", pairs, ("int64",), (n,))
    return n, width, shares


def weigh_backward(
    dy: Tensor, x: Tensor, share: Tensor, pairs: Tensor, dshare: Tensor
) -> tuple[int, int, int]:
    """(n, F, N * k)."""
    sizes = weigh(x, share, pairs)
    _need("dy", dy, (dtype_name(x),), sizes[:2])
    _need("dshare", dshare, (dtype_name(share),), sizes[2:])
    return sizes


def byte(value: int) -> int:
    """A byte value."""
    if not 0 <= value <= 255:
        raise ValueError(f"byte is {value}, expected 0 to 255")
    return value


OUT_OF_RANGE = {
    "targets": "targets holds an id outside the vocabulary that is not -100",
    "ids": "ids holds an id outside the table",
    "positions": "positions holds one beyond the rows of cos and sin",
    "chosen": "chosen holds an expert that there is not",
    "pairs": "pairs holds one beyond the shares",
}
"""What both families say about an index that is out of range."""
