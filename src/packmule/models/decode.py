"""Generation: a layer over a key/value cache, the last token's logits, sampling.

Letters: n new tokens, H hidden, A heads, K key/value heads, G = A / K, D head dimension, F
feed-forward, V vocabulary, M cache positions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from packmule.models.attention import attend_keys
from packmule.shapes.bodies import attention_units

if TYPE_CHECKING:
    from packmule.models.llama import Decoder

Tensors = Mapping[str, Tensor]


def layer_decode(
    decoder: Decoder,
    weights: Tensors,
    x: Tensor,
    cache: Tensor,
    position: int,
    scratch: Tensors,
    out: Tensor,
) -> None:
    """One decoder layer for n tokens of one document, at positions position..position+n-1.

    Args:
        x: c [n, H]; out: c [n, H], may be x.
        cache: c [2, K, M, D], keys (after RoPE) and values; entries before `position` are read,
            the next n are written.
        scratch: decode_scratch for at least n tokens and this M.

    Raises:
        ValueError: the tokens run past the cache.
    """
    kernels, shape, n = decoder.kernels, decoder.shape, len(x)
    stop = position + n
    if stop > cache.shape[2]:
        raise ValueError(f"position {stop - 1} is past a cache of {cache.shape[2]}")
    normed, middle, q, k, v, gate, up = (
        scratch[name][:n] for name in ("normed", "middle", "q", "k", "v", "gate", "up")
    )
    positions = torch.arange(position, stop, dtype=torch.int32)
    kernels.rmsnorm(x, weights["norm1.weight"], shape.norm_eps, normed, scratch["rstd"][:n])
    for name, target in (("q", q), ("k", k), ("v", v)):
        torch.mm(normed, weights[f"{name}.weight"].t(), out=target)
    for target in (q, k):
        kernels.rope(target, decoder.cos, decoder.sin, positions, shape.head_dim, False)
    for plane, new in zip(cache, (k, v), strict=True):
        plane[:, position:stop].copy_(new.view(n, shape.kv_heads, shape.head_dim).transpose(0, 1))
    heads = attention_units(shape, stop)
    for first in range(0, shape.kv_heads, heads):
        some = slice(first, min(first + heads, shape.kv_heads))
        keys, values = (plane[some, :stop] for plane in cache)
        grouped = q.view(1, n, shape.kv_heads, -1, shape.head_dim).permute(0, 2, 3, 1, 4)[:, some]
        attend_keys(kernels, grouped, keys, values, position, grouped, scratch["lse"], scratch)
    torch.addmm(x, q, weights["o.weight"].t(), out=middle)
    kernels.rmsnorm(middle, weights["norm2.weight"], shape.norm_eps, normed, scratch["rstd"][:n])
    torch.mm(normed, weights["gate.weight"].t(), out=gate)
    torch.mm(normed, weights["up.weight"].t(), out=up)
    kernels.swiglu(gate, up, gate)
    torch.addmm(middle, gate, weights["down.weight"].t(), out=out)


def head_logits(decoder: Decoder, weights: Tensors, x: Tensor, scratch: Tensors) -> Tensor:
    """float32 [V]: the logits after the last of x's tokens.

    Args:
        weights: "norm.weight" and "weight" [V, H].
        x: c [n, H], of which the last row is used.
        scratch: decode_scratch.
    """
    normed = scratch["normed"][:1]
    decoder.kernels.rmsnorm(
        x[-1:], weights["norm.weight"], decoder.shape.norm_eps, normed, scratch["rstd"][:1]
    )
    torch.mm(normed, weights["weight"].t(), out=scratch["logits"])
    return scratch["logits"][0].float()


def sample(logits: Tensor, temperature: float, top_p: float, generator: torch.Generator | None) -> int:
    """Choose the next token.

    Args:
        logits: float32 [V].
        temperature: divides the logits; 0 takes the most likely token (the lowest id of equals).
        top_p: keep the smallest set of most likely tokens with at least this probability
            (nucleus sampling, Holtzman et al. 2020); 1 keeps all.
        generator: where randomness comes from; needed unless temperature is 0.

    Raises:
        ValueError: a negative temperature, top_p outside (0, 1], logits that are not finite.
    """
    if temperature < 0 or not 0 < top_p <= 1:
        raise ValueError(f"temperature {temperature} must be >= 0 and top_p {top_p} in (0, 1]")
    if not bool(torch.isfinite(logits).all()):
        raise ValueError("logits are not finite")
    if temperature == 0:
        return int(torch.argmax(logits))
    order = torch.sort(logits.double() / temperature, descending=True, stable=True)
    probability = torch.softmax(order.values, 0)
    # A token stays while those before it have not reached top_p; the first always does.
    before = probability.cumsum(0) - probability
    kept = probability.masked_fill(before >= top_p, 0.0)
    return int(order.indices[torch.multinomial(kept, 1, generator=generator)])
