"""What a kernel family offers: one protocol, implemented by `native` and by `reference`.

Letters: N tokens, H hidden, F feed-forward, V vocabulary, D head dimension, P positions,
C tokens of a loss chunk, B batch of attention matrices, E experts, k experts of a token.
Dtypes: `c` compute (float32, bfloat16 or float64); `s` statistic and `g` gradient, both float64 if
c is float64, else float32. Tensors are contiguous and on the CPU (of the torch
family: all on one device). Arithmetic is done in `s` and
rounded to `c` once. Outputs are the caller's; nothing is returned but scalars. A buffer that is
only written is never read, whatever it holds.

Every method raises ValueError when a shape, dtype, layout or index breaks the contract.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    from torch import Tensor
    from typing_extensions import Buffer

Family = Literal["native", "torch"]


class Kernels(Protocol):
    """The primitives of a decoder's forward, backward and update."""

    @property
    def threads(self) -> int:
        """Threads a call may use; never changes a result."""

    @property
    def isa(self) -> str:
        """ "scalar", "avx2", "avx512", or "torch". Never changes a result of the native family."""

    @property
    def family(self) -> Family:
        """Which of the two implementations this is; the two agree to rounding."""

    def close(self) -> None:
        """End the worker threads. Calling it twice is fine; other methods then raise ValueError."""

    def rmsnorm(
        self, x: Tensor, weight: Tensor, eps: float, out: Tensor, rstd: Tensor, offset: float = 0.0
    ) -> None:
        """out = x * rstd * (offset + weight) with rstd = 1 / sqrt(mean(x^2) + eps) (Zhang & Sennrich
        2019).

        x, out: c [N, H], may be the same tensor; weight: c [H]; rstd: s [N].
        """

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
        """Gradients of `rmsnorm` from the gradient of its output.

        dx = residual (or 0) + rstd * (u - xhat * mean(u * xhat)), u = dy * (offset + weight),
        xhat = x * rstd; dweight = (first: 0, else dweight) + sum over rows of dy * xhat.
        dy, x, dx, residual: c [N, H]; dx may be dy or residual; rstd: s [N]; dweight: g [H].
        """

    def layernorm(
        self, x: Tensor, weight: Tensor, bias: Tensor, eps: float, out: Tensor, mean: Tensor, rstd: Tensor
    ) -> None:
        """out = (x - mean) * rstd * weight + bias with mean = mean(x) and
        rstd = 1 / sqrt(mean((x - mean)^2) + eps) (Ba et al. 2016).

        x, out: c [N, H], may be the same tensor; weight, bias: c [H]; mean, rstd: s [N].
        """

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
        """Gradients of `layernorm` from the gradient of its output; the bias's is `column_sums`.

        dx = residual (or 0) + rstd * (u - mean(u) - xhat * mean(u * xhat)), u = dy * weight,
        xhat = (x - mean) * rstd; dweight = (first: 0, else dweight) + sum over rows of dy * xhat.
        Shapes and aliases as in `rmsnorm_backward`; mean: s [N].
        """

    def column_sums(self, x: Tensor, out: Tensor, first: bool) -> None:
        """out = (first: 0, else out) + sum over rows of x: the gradient of a bias.

        x: c [N, H]; out: g [H].
        """

    def rope(
        self, x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, head_dim: int, inverse: bool
    ) -> None:
        """Rotate the first 2 R dimensions of each head in place, halves layout:
        (x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin) (RoFormer, Su et al. 2021; layout of Hugging
        Face Llama). `inverse` turns back, which is the backward.

        x: c [N, heads * D]; cos, sin: s [P, R], 2 R at most D; positions: int32 [N], each below P.
        """

    def activate(self, gate: Tensor, up: Tensor | None, out: Tensor, kind: str) -> None:
        """out = f(gate) * up (Shazeer 2020), or f(gate) where there is no up.

        f is silu, x * sigmoid(x), or gelu_tanh, x * (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2
        (Hendrycks & Gimpel 2016). All c, one shape; out may be either input.
        """

    def activate_backward(
        self,
        da: Tensor,
        gate: Tensor,
        up: Tensor | None,
        dgate: Tensor,
        dup: Tensor | None,
        kind: str,
    ) -> None:
        """Gradients of `activate`. All c, one shape; dgate may be gate, dup may be up."""

    def softcap(self, x: Tensor, scale: float, cap: float) -> None:
        """x = cap * tanh(x * scale / cap), in place (Gemma 2, arXiv:2408.00118). x: c."""

    def softcap_backward(self, dy: Tensor, y: Tensor, scale: float, cap: float) -> None:
        """dy = dy * (1 - (y / cap)^2) * scale, in place: the gradient of `softcap`'s input.

        dy, y: c, one shape; y is what `softcap` gave.
        """

    def cross_entropy(
        self, logits: Tensor, targets: Tensor, scale: float, loss: Tensor, gradient: bool
    ) -> None:
        """loss = logsumexp(row) - row[target], 0 where target is -100; with `gradient` the
        logits become (softmax - onehot) * scale, rows of 0 where ignored. Online softmax
        (Milakov & Gimelshein 2018), rescaled per fixed block of the row.

        logits: c [C, V]; targets: int64 [C]; loss: s [C], not scaled.
        """

    def embedding(
        self, table: Tensor, ids: Tensor, out: Tensor, scale: float = 1.0, add: bool = False
    ) -> None:
        """out[i] = (add: out[i], else 0) + table[ids[i]] * scale.

        table: c [V, H]; ids: int64 [N]; out: c [N, H].
        """

    def embedding_backward(
        self, dy: Tensor, ids: Tensor, grad: Tensor, first: bool, scale: float = 1.0
    ) -> None:
        """grad = (first: 0, else grad); grad[ids[i]] += dy[i] * scale, tokens in order.

        dy: c [N, H]; ids: int64 [N]; grad: g [V, H].
        """

    def accumulate(self, dst: Tensor, src: Tensor, first: bool) -> None:
        """dst = src (first) or dst + src, element by element. dst: g; src: c or g, as many."""

    def cast(self, dst: Tensor, src: Tensor) -> None:
        """dst = src, element by element, between any two of the dtypes; to nearest even
        (float64 to bfloat16 by way of float32, as torch does)."""

    def sum_squares(self, x: Tensor) -> float:
        """Sum of x^2 in float64 over fixed chunks of 65536 elements, chunks added in order."""

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
        """One AdamW update in one pass over memory (Loshchilov & Hutter 2019, as torch.optim.AdamW).

        master, m, v: g, one shape, updated; grad: g or c, multiplied by grad_scale; weight: c,
        receives the new master, or None; step counts from 1.
        """

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
        """One AdaLomo update of a whole tensor (Lv et al. 2024, algorithm 1).

        g = grad * grad_scale; rows = decay * rows + (1 - decay) * (mean of g^2 over a row + eps), columns
        alike; u = g / sqrt(rows columns / mean(rows)); rate = lr * max(least, rms(master));
        master = master * (1 - rate * weight_decay) - u * rate / max(1, rms(u) / most).
        Of a vector, where there are no columns: rows = decay * rows + (1 - decay) * (g^2 + eps),
        u = g / sqrt(rows). Sums are taken in float64.

        master: g [R * C]; rows: g [R]; columns: g [C]; all updated; grad: g or c; weight: c, receives
        the new master, or None. Numbers of elements count, not shapes.
        """

    def sgd(
        self,
        master: Tensor,
        grad: Tensor,
        weight: Tensor | None,
        lr: float,
        weight_decay: float,
        grad_scale: float,
    ) -> None:
        """master = master * (1 - lr * weight_decay) - grad * (lr * grad_scale), in one pass.

        master: g, updated; grad: g or c; weight: c, receives the new master, or None.
        """

    def crc32c(self, buffer: Buffer, value: int = 0) -> int:
        """CRC-32C (Castagnoli; RFC 3720) of a contiguous buffer, going on from `value`."""

    def crc32c_wide(self, buffer: Buffer) -> int:
        """Like `crc32c` from 0 on, by all threads."""

    def crc32c_address(self, address: int, nbytes: int, value: int = 0) -> int:
        """Like `crc32c`, of nbytes bytes at an address the caller keeps alive."""

    def fill(self, address: int, nbytes: int, byte: int) -> None:
        """Set nbytes bytes at an address to `byte` (0..255)."""

    def causal_softmax(
        self, scores: Tensor, offset: int, scale: float, lse: Tensor, window: int | None = None
    ) -> None:
        """scores = softmax(scores * scale) in place; row i sees columns 0..i + offset, of these at
        most the last `window`; the others (whatever they hold) become 0; lse = logsumexp of what a
        row sees, scaled.

        scores: c [B, n, m]; lse: s [B, n]; offset >= 0; window >= 1. Every row sees a column.
        """

    def causal_softmax_backward(self, p: Tensor, dp: Tensor, delta: Tensor, scale: float) -> None:
        """dp = p * (dp - delta) * scale, in place: the gradient of the unscaled scores.

        p, dp: c [B, n, m]; delta: s [B, n], each row's sum of p * dp.
        """

    def route(
        self,
        logits: Tensor,
        renormalize: bool,
        chosen: Tensor,
        share: Tensor,
        mass: Tensor,
    ) -> None:
        """The k experts of each token and how much each of them counts (Shazeer et al. 2017).

        p = softmax(row); chosen = the k experts of the largest logits, largest first, of equal
        ones the lowest; share = p[chosen], divided by its sum where `renormalize`; mass = sum of
        p over rows. logits: c [N, E], E at most 1024; chosen: int32 [N, k]; share: s [N, k];
        mass: s [E].
        """

    def route_backward(
        self,
        logits: Tensor,
        chosen: Tensor,
        dshare: Tensor,
        balance: Tensor,
        renormalize: bool,
        dlogits: Tensor,
    ) -> None:
        """Gradients of `route` from those of its shares and of its probabilities.

        dp = balance, plus at the chosen experts dshare (or, where `renormalize`,
        (dshare - sum(dshare * share)) / sum(p[chosen])); dlogits = p * (dp - sum(p * dp)).
        logits, dlogits: c [N, E], may be the same tensor; chosen: int32 [N, k]; dshare: s [N, k];
        balance: s [E].
        """

    def dispatch(self, chosen: Tensor, pairs: Tensor, tokens: Tensor, offsets: Tensor) -> None:
        """Sort (token, rank) pairs by expert, in order of tokens within each.

        Those of expert e are offsets[e]..offsets[e + 1] - 1; pairs: flat index into `chosen`;
        tokens = pairs // k. chosen: int32 [N, k], below E; pairs, tokens: int64 [N * k];
        offsets: int64 [E + 1].
        """

    def weigh(self, x: Tensor, share: Tensor, pairs: Tensor) -> None:
        """x[i] *= share[pairs[i]], in place. x: c [n, F]; share: s [N * k]; pairs: int64 [n]."""

    def weigh_backward(self, dy: Tensor, x: Tensor, share: Tensor, pairs: Tensor, dshare: Tensor) -> None:
        """Gradients of `weigh`, and its output again: dshare[pairs[i]] = sum(dy[i] * x[i]), then
        dy[i] *= share[pairs[i]] and x[i] *= share[pairs[i]], in place.

        dy, x: c [n, F]; share, dshare: s [N * k]; pairs: int64 [n], each at most once.
        """
