"""transformers' LlamaForCausalLM as the autograd oracle of the bodies."""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch
import transformers
from tests.parity.plain import Named, PlainModel
from torch import Tensor

from packmule.models.rope import rope_tables
from packmule.shapes.model import ModelShape


class ExactNorm(torch.nn.Module):
    """LlamaRMSNorm without its detour through float32, for float64 comparisons."""

    def __init__(self, norm: torch.nn.Module) -> None:
        super().__init__()
        self.weight, self.eps = norm.weight, norm.variance_epsilon

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


class ExactRotary(torch.nn.Module):
    """LlamaRotaryEmbedding in float64."""

    def __init__(self, shape: ModelShape, positions: int) -> None:
        super().__init__()
        self.cos, self.sin = rope_tables(shape.layer(1).rope, positions, "float64")

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        return tuple(torch.cat((t[position_ids],) * 2, dim=-1) for t in (self.cos, self.sin))


def config_of(shape: ModelShape) -> transformers.LlamaConfig:
    """The Hugging Face config of a shape."""
    return transformers.LlamaConfig(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        intermediate_size=shape.ffn,
        rms_norm_eps=shape.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
        tie_word_embeddings=shape.tied,
        max_position_embeddings=shape.max_positions,
        attn_implementation="sdpa",
        use_cache=False,
    )


def _hugging_face_name(block: str, name: str) -> str:
    if block == "embed":
        return "model.embed_tokens.weight"
    if block == "head":
        return "model.norm.weight" if name == "norm.weight" else "lm_head.weight"
    local = name.removesuffix(".weight")
    place = {"norm1": "input_layernorm", "norm2": "post_attention_layernorm"}.get(local)
    if place is None:
        place = f"self_attn.{local}_proj" if local in "qkvo" else f"mlp.{local}_proj"
    return f"model.layers.{block.removeprefix('layer')}.{place}.weight"


def oracle(model: PlainModel, positions: int = 512) -> transformers.LlamaForCausalLM:
    """The same weights in transformers, in the model's master dtype (float64 made exact)."""
    twin = transformers.LlamaForCausalLM(config_of(model.shape))
    state = {
        _hugging_face_name(block.name, name): value
        for block, named in zip(model.blocks, model.params, strict=True)
        for name, value in named.items()
    }
    missing, unexpected = twin.load_state_dict(state, strict=False)
    assert not unexpected and all(re.search("lm_head|rotary", key) for key in missing)
    assert bool(missing) == model.shape.tied
    if model.types.master == "float64":
        twin = twin.double()
        # Loaded through float32 above: masters are float32 values, so nothing was lost.
        for layer in twin.model.layers:
            layer.input_layernorm = ExactNorm(layer.input_layernorm)
            layer.post_attention_layernorm = ExactNorm(layer.post_attention_layernorm)
        twin.model.norm = ExactNorm(twin.model.norm)
        twin.model.rotary_emb = ExactRotary(model.shape, positions)
    return twin


def oracle_step(model: PlainModel, documents: Sequence[Tensor]) -> tuple[float, list[Named], list[Tensor]]:
    """Mean next-token loss over all targets, gradients by block, logits of every document.

    Documents run right-padded in one batch, padding masked from loss.
    """
    with torch.enable_grad():
        twin = oracle(model)
        longest = max(len(d) for d in documents)
        ids = torch.zeros(len(documents), longest, dtype=torch.int64)
        targets = torch.full_like(ids, -100)
        for row, document in enumerate(documents):
            ids[row, : len(document)] = document
            targets[row, : len(document) - 1] = document[1:]
        mask = torch.arange(longest)[None, :] < torch.tensor([len(d) for d in documents])[:, None]
        logits = twin(input_ids=ids, attention_mask=mask.long()).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
        loss = loss / int((targets >= 0).sum())
        loss.backward()
    parameters = dict(twin.named_parameters())
    grads = [
        {name: parameters[_hugging_face_name(block.name, name)].grad for name in named}
        for block, named in zip(model.blocks, model.params, strict=True)
    ]
    rows = [logits[row, : len(document)].detach() for row, document in enumerate(documents)]
    return float(loss), grads, rows
