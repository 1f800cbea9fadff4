"""Generation: a layer over a key/value cache, the last token's logits, sampling.

Letters: n new tokens, H hidden, A heads, K key/value heads, G = A / K, D head dimension, F
feed-forward, V vocabulary, M cache positions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from packmule.models.attention import attend_keys
from packmule.models.context import Decoder, Tensors
from packmule.models.experts import open_forward
from packmule.models.feed_forward import half_of
from packmule.models.norms import norm_forward
from packmule.models.products import linear
from packmule.models.self_attention import add_output, queries_keys_values
from packmule.shapes.attention import attention_units

if TYPE_CHECKING:
    from packmule.shapes.layer import LayerShape


def layer_decode(
    decoder: Decoder,
    layer: LayerShape,
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
    middle = _attend(decoder, layer, weights, x, cache, position, scratch)
    half_of(layer).forward(decoder, layer, weights, middle, scratch, scratch, out)


def route_decode(
    decoder: Decoder,
    layer: LayerShape,
    weights: Tensors,
    x: Tensor,
    cache: Tensor,
    position: int,
    scratch: Tensors,
    routed: Tensors,
    mixed: Tensor,
) -> None:
    """The first part of a layer with experts; `experts.experts_forward` follows.

    Args:
        routed, mixed: as in `experts.open_forward`.
        The others are as in `layer_decode`.
    """
    middle = _attend(decoder, layer, weights, x, cache, position, scratch)
    open_forward(decoder, layer, weights, middle, scratch, scratch, routed, mixed, None)


def _attend(
    decoder: Decoder,
    layer: LayerShape,
    weights: Tensors,
    x: Tensor,
    cache: Tensor,
    position: int,
    scratch: Tensors,
) -> Tensor:
    """The attention half: c [n, H] in scratch."""
    n = len(x)
    stop = position + n
    if stop > cache.shape[2]:
        raise ValueError(f"position {stop - 1} is past a cache of {cache.shape[2]}")
    positions = torch.arange(position, stop, dtype=torch.int32, device=x.device)
    turn = decoder.turn(layer, positions, [cache.shape[2]])
    queries_keys_values(decoder, layer, weights, turn, x, scratch, scratch)
    for plane, name in zip(cache, ("k", "v"), strict=True):
        new = scratch[name][:n].view(n, layer.kv_heads, layer.head_dim)
        plane[:, position:stop].copy_(new.transpose(0, 1))
    q, attention = (
        scratch[name][:n].view(1, n, layer.kv_heads, -1, layer.head_dim).permute(0, 2, 3, 1, 4)
        for name in ("q", "attention")
    )
    heads = attention_units(layer, stop)
    for first in range(0, layer.kv_heads, heads):
        some = slice(first, min(first + heads, layer.kv_heads))
        keys, values = (plane[some, :stop] for plane in cache)
        attend_keys(
            decoder.kernels, layer, q[:, some], keys, values, position, attention[:, some],
            scratch["lse"], scratch,
        )  # fmt: skip
    middle = scratch["middle"][:n]
    add_output(decoder, layer, weights, x, scratch, scratch, middle)
    return middle


def head_logits(decoder: Decoder, weights: Tensors, x: Tensor, scratch: Tensors) -> Tensor:
    """float32 [V]: the logits after the last of x's tokens.

    Args:
        weights: "norm.weight" and "weight" [V, H].
        x: c [n, H], of which the last row is used.
        scratch: head_decode_scratch.
    """
    norm_forward(decoder.kernels, decoder.shape.norm, weights, "norm", x[-1:], scratch["normed"], scratch)
    logits, cap = scratch["logits"], decoder.shape.variant.logit_cap
    linear(scratch["normed"], weights["weight"], logits, scratch)
    if cap is not None:
        decoder.kernels.softcap(logits, 1.0, cap)
    return logits[0].float()


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
