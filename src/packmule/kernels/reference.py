"""The readable twin of the native kernels, in plain torch: the oracle of their tests, and
what runs where the native library is not built."""

from __future__ import annotations

import ctypes
import math
from typing import TYPE_CHECKING

import torch

from packmule.kernels import checks, crc
from packmule.kernels.contract import Family

if TYPE_CHECKING:
    from torch import Tensor
    from typing_extensions import Buffer

CHUNK = 65536
"""Elements of one partial sum of `sum_squares`."""


def _statistic(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def _inside(name: str, index: Tensor, size: int) -> None:
    if index.numel() and not 0 <= int(index.min()) <= int(index.max()) < size:
        raise ValueError(checks.OUT_OF_RANGE[name])


def _inner(x: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """(u, x times u's derivative) of an activation x * sigmoid(u(x)). Of gelu_tanh u is an odd cubic,
    cut off where the sigmoid is 0 or 1 anyway, since the cube would overflow."""
    if kind == "silu":
        return x, x
    a, b, cut = 2 * math.sqrt(2 / math.pi), 0.044715, x.clamp(-100, 100)
    return a * (cut + b * cut**3), a * (cut + 3 * b * cut**3)


class TorchKernels:
    """`packmule.kernels.contract.Kernels` in torch operations."""

    isa = "torch"
    family: Family = "torch"

    def __init__(self, threads: int) -> None:
        self.threads = threads

    def close(self) -> None:
        """Nothing to end: torch owns its threads."""

    def rmsnorm(
        self, x: Tensor, weight: Tensor, eps: float, out: Tensor, rstd: Tensor, offset: float = 0.0
    ) -> None:
        checks.rmsnorm(x, weight, out, rstd)
        s = _statistic(x)
        wide = x.to(s)
        rstd.copy_(torch.rsqrt(wide.square().mean(dim=1) + eps))
        out.copy_(wide * rstd[:, None] * (weight.to(s) + offset))

    def rmsnorm_backward(
        self,
        dy: Tensor,
        x: Tensor,
        weight: Tensor,
        rstd: Tensor,
        dx: Tensor,
        dweight: Tensor,
        residual: Tensor | None,
        first: bool,
        offset: float = 0.0,
    ) -> None:
        checks.rmsnorm_backward(dy, x, weight, rstd, dx, dweight, residual)
        s = _statistic(x)
        wide = dy.to(s)
        xhat = x.to(s) * rstd[:, None]
        u = wide * (weight.to(s) + offset)
        total = (wide * xhat).sum(dim=0)
        inner = rstd[:, None] * (u - xhat * (u * xhat).mean(dim=1, keepdim=True))
        dx.copy_(inner if residual is None else residual.to(s) + inner)
        dweight.copy_(total if first else dweight + total)

    def layernorm(
        self, x: Tensor, weight: Tensor, bias: Tensor, eps: float, out: Tensor, mean: Tensor, rstd: Tensor
    ) -> None:
        checks.layernorm(x, weight, bias, out, mean, rstd)
        s = _statistic(x)
        wide = x.to(s)
        mean.copy_(wide.mean(dim=1))
        centered = wide - mean[:, None]
        rstd.copy_(torch.rsqrt(centered.square().mean(dim=1) + eps))
        out.copy_(centered * rstd[:, None] * weight.to(s) + bias.to(s))

    def layernorm_backward(
        self,
        dy: Tensor,
        x: Tensor,
        weight: Tensor,
        mean: Tensor,
        rstd: Tensor,
        dx: Tensor,
        dweight: Tensor,
        residual: Tensor | None,
        first: bool,
    ) -> None:
        checks.layernorm_backward(dy, x, weight, mean, rstd, dx, dweight, residual)
        s = _statistic(x)
        wide = dy.to(s)
        xhat = (x.to(s) - mean[:, None]) * rstd[:, None]
        u = wide * weight.to(s)
        total = (wide * xhat).sum(dim=0)
        centered = u - u.mean(dim=1, keepdim=True)
        inner = rstd[:, None] * (centered - xhat * (u * xhat).mean(dim=1, keepdim=True))
        dx.copy_(inner if residual is None else residual.to(s) + inner)
        dweight.copy_(total if first else dweight + total)

    def column_sums(self, x: Tensor, out: Tensor, first: bool) -> None:
        checks.column_sums(x, out)
        total = x.to(out.dtype).sum(dim=0)
        out.copy_(total if first else out + total)

    def rope(
        self, x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, head_dim: int, inverse: bool
    ) -> None:
        n, heads, _, half, rows = checks.rope(x, cos, sin, positions, head_dim)
        _inside("positions", positions, rows)
        at = positions.long()
        c, s = cos[at][:, None, :], sin[at][:, None, :]
        if inverse:
            s = -s
        halves = x.view(n, heads, head_dim)[..., : 2 * half].view(n, heads, 2, half)
        x1, x2 = halves.to(_statistic(x)).unbind(dim=2)
        halves.copy_(torch.stack((x1 * c - x2 * s, x2 * c + x1 * s), dim=2))

    def activate(self, gate: Tensor, up: Tensor | None, out: Tensor, kind: str) -> None:
        checks.activation(kind, gate, up, out=out)
        wide = gate.to(_statistic(gate))
        value = wide * torch.sigmoid(_inner(wide, kind)[0])
        out.copy_(value if up is None else value * up.to(wide.dtype))

    def activate_backward(
        self,
        da: Tensor,
        gate: Tensor,
        up: Tensor | None,
        dgate: Tensor,
        dup: Tensor | None,
        kind: str,
    ) -> None:
        checks.activation(kind, gate, up, da=da, dgate=dgate, dup=dup)
        s = _statistic(gate)
        d, g = da.to(s), gate.to(s)
        inner, slope = _inner(g, kind)
        sigmoid = torch.sigmoid(inner)
        to_gate = d * (sigmoid * (1 + slope * (1 - sigmoid)))
        if up is not None and dup is not None:
            to_gate *= up.to(s)
            dup.copy_(d * (g * sigmoid))
        dgate.copy_(to_gate)

    def softcap(self, x: Tensor, scale: float, cap: float) -> None:
        checks.softcap(x, scale, cap)
        x.copy_(cap * torch.tanh(x.to(_statistic(x)) * (scale / cap)))

    def softcap_backward(self, dy: Tensor, y: Tensor, scale: float, cap: float) -> None:
        checks.softcap(dy, scale, cap, y)
        s = _statistic(dy)
        dy.copy_(dy.to(s) * (1 - (y.to(s) / cap).square()) * scale)

    def cross_entropy(
        self, logits: Tensor, targets: Tensor, scale: float, loss: Tensor, gradient: bool
    ) -> None:
        chunk, vocab = checks.cross_entropy(logits, targets, loss)
        seen = targets != checks.IGNORED
        _inside("targets", targets[seen], vocab)
        if not chunk:
            return
        wide = logits.to(_statistic(logits))
        at = targets.where(seen, 0)[:, None]
        loss.copy_((-torch.log_softmax(wide, dim=1).gather(1, at)[:, 0]).where(seen, 0.0))
        if gradient:
            p = torch.softmax(wide, dim=1)
            p.scatter_add_(1, at, -torch.ones_like(at, dtype=p.dtype))
            logits.copy_((p * scale).where(seen[:, None], 0.0))

    def embedding(
        self, table: Tensor, ids: Tensor, out: Tensor, scale: float = 1.0, add: bool = False
    ) -> None:
        _, vocab, _ = checks.embedding(table, ids, out)
        _inside("ids", ids, vocab)
        rows = table[ids].to(_statistic(table)) * scale
        out.copy_(out.to(rows.dtype) + rows if add else rows)

    def embedding_backward(
        self, dy: Tensor, ids: Tensor, grad: Tensor, first: bool, scale: float = 1.0
    ) -> None:
        _, vocab, _ = checks.embedding_backward(dy, ids, grad)
        _inside("ids", ids, vocab)
        if first:
            grad.zero_()
        grad.index_add_(0, ids, dy.to(grad.dtype) * scale)

    def accumulate(self, dst: Tensor, src: Tensor, first: bool) -> None:
        checks.accumulate(dst, src)
        flat = dst.view(-1)
        flat.copy_(src.view(-1)) if first else flat.add_(src.view(-1))

    def cast(self, dst: Tensor, src: Tensor) -> None:
        checks.cast(dst, src)
        dst.view(-1).copy_(src.view(-1))

    def sum_squares(self, x: Tensor) -> float:
        checks.same(x=x)
        flat = x.view(-1)
        starts = range(0, flat.numel(), CHUNK)
        return sum((float(flat[i : i + CHUNK].double().square().sum()) for i in starts), 0.0)

    def adamw(
        self,
        master: Tensor,
        m: Tensor,
        v: Tensor,
        grad: Tensor,
        weight: Tensor | None,
        lr: float,
        beta1: float,
        beta2: float,
        eps: float,
        weight_decay: float,
        step: int,
        grad_scale: float,
    ) -> None:
        checks.adamw(master, m, v, grad, weight, step)
        g = grad.view(master.shape).to(master.dtype) * grad_scale
        master.mul_(1 - lr * weight_decay)
        m.mul_(beta1).add_(g, alpha=1 - beta1)
        v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
        denominator = (v.sqrt() / math.sqrt(1 - beta2**step)).add_(eps)
        master.addcdiv_(m, denominator, value=-lr / (1 - beta1**step))
        if weight is not None:
            weight.view(-1).copy_(master.view(-1))

    def adalomo(
        self,
        master: Tensor,
        rows: Tensor,
        columns: Tensor | None,
        grad: Tensor,
        weight: Tensor | None,
        lr: float,
        decay: float,
        eps: float,
        least: float,
        most: float,
        weight_decay: float,
        grad_scale: float,
    ) -> None:
        n, width = checks.adalomo(master, rows, columns, grad, weight)
        s, count = master.dtype, master.numel()
        g = grad.view(-1).to(s) * grad_scale
        if columns is None:
            rows.mul_(decay).add_((g * g + eps) * (1 - decay))
            u = g / rows.sqrt()
        else:
            square = g.view(n, width).double().square()
            for factor, dimension in ((rows, 1), (columns, 0)):
                fresh = square.mean(dim=dimension) + eps
                factor.copy_(factor.double() * decay + fresh * (1 - decay))
            by_row = (rows.double() / rows.double().mean()).rsqrt().to(s)
            by_column = columns.double().rsqrt().to(s)
            u = (g.view(n, width) * (by_column * by_row[:, None])).view(-1)
        reach = math.sqrt(float(u.double().square().sum()) / count) / most
        rate = lr * max(least, math.sqrt(float(master.double().square().sum()) / count))
        flat = master.view(-1)
        flat.mul_(1 - rate * weight_decay).sub_(u * (rate / max(1.0, reach)))
        if weight is not None:
            weight.view(-1).copy_(flat)

    def sgd(
        self,
        master: Tensor,
        grad: Tensor,
        weight: Tensor | None,
        lr: float,
        weight_decay: float,
        grad_scale: float,
    ) -> None:
        checks.sgd(master, grad, weight)
        g = grad.view(master.shape).to(master.dtype)
        master.mul_(1 - lr * weight_decay).sub_(g * (lr * grad_scale))
        if weight is not None:
            weight.view(-1).copy_(master.view(-1))

    def crc32c(self, buffer: Buffer, value: int = 0) -> int:
        return crc.crc32c(buffer, value)

    def crc32c_wide(self, buffer: Buffer) -> int:
        return self.crc32c(buffer)

    def crc32c_address(self, address: int, nbytes: int, value: int = 0) -> int:
        return crc.crc32c((ctypes.c_ubyte * nbytes).from_address(address), value) if nbytes else value

    def fill(self, address: int, nbytes: int, byte: int) -> None:
        ctypes.memset(address, checks.byte(byte), nbytes)

    def causal_softmax(
        self, scores: Tensor, offset: int, scale: float, lse: Tensor, window: int | None = None
    ) -> None:
        _, n, m = checks.causal_softmax(scores, offset, lse, window)
        hidden = torch.ones(n, m, dtype=torch.bool, device=scores.device).triu_(offset + 1)
        if window is not None:
            hidden |= torch.ones_like(hidden).tril_(offset - window)
        wide = (scores.to(_statistic(scores)) * scale).masked_fill_(hidden, -math.inf)
        lse.copy_(torch.logsumexp(wide, dim=2))
        scores.copy_(torch.softmax(wide, dim=2).masked_fill_(hidden, 0))

    def causal_softmax_backward(self, p: Tensor, dp: Tensor, delta: Tensor, scale: float) -> None:
        checks.causal_softmax_backward(p, dp, delta)
        s = _statistic(p)
        dp.copy_(p.to(s) * (dp.to(s) - delta[:, :, None]) * scale)

    def route(self, logits: Tensor, renormalize: bool, chosen: Tensor, share: Tensor, mass: Tensor) -> None:
        _, _, k = checks.route(logits, chosen, share, mass)
        p = torch.softmax(logits.to(_statistic(logits)), dim=1)
        best = torch.sort(logits, dim=1, descending=True, stable=True).indices[:, :k]
        kept = p.gather(1, best)
        chosen.copy_(best)
        share.copy_(kept / kept.sum(dim=1, keepdim=True) if renormalize else kept)
        mass.copy_(p.sum(dim=0))

    def route_backward(
        self,
        logits: Tensor,
        chosen: Tensor,
        dshare: Tensor,
        balance: Tensor,
        renormalize: bool,
        dlogits: Tensor,
    ) -> None:
        n, experts, _ = checks.route_backward(logits, chosen, dshare, balance, dlogits)
        _inside("chosen", chosen, experts)
        p, at = torch.softmax(logits.to(_statistic(logits)), dim=1), chosen.long()
        given = dshare
        if renormalize:
            kept = p.gather(1, at)
            total = kept.sum(dim=1, keepdim=True)
            given = (dshare - (dshare * kept / total).sum(dim=1, keepdim=True)) / total
        dp = balance.expand(n, experts).scatter_add(1, at, given)
        dlogits.copy_(p * (dp - (p * dp).sum(dim=1, keepdim=True)))

    def dispatch(self, chosen: Tensor, pairs: Tensor, tokens: Tensor, offsets: Tensor) -> None:
        _, experts, k = checks.dispatch(chosen, pairs, tokens, offsets)
        _inside("chosen", chosen, experts)
        flat = chosen.view(-1).long()
        pairs.copy_(torch.argsort(flat, stable=True))
        tokens.copy_(pairs // k)
        offsets.copy_(torch.searchsorted(flat[pairs], torch.arange(experts + 1, device=flat.device)))

    def weigh(self, x: Tensor, share: Tensor, pairs: Tensor) -> None:
        _, _, shares = checks.weigh(x, share, pairs)
        _inside("pairs", pairs, shares)
        x.copy_(x.to(share.dtype) * share[pairs][:, None])

    def weigh_backward(self, dy: Tensor, x: Tensor, share: Tensor, pairs: Tensor, dshare: Tensor) -> None:
        _, _, shares = checks.weigh_backward(dy, x, share, pairs, dshare)
        _inside("pairs", pairs, shares)
        factor, wide = share[pairs][:, None], dy.to(share.dtype)
        dshare[pairs] = (wide * x.to(share.dtype)).sum(dim=1)
        dy.copy_(wide * factor)
        x.copy_(x.to(share.dtype) * factor)
