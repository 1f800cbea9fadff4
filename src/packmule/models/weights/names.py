"""Block-local parameter names <-> Hugging Face names of the Llama family."""

from __future__ import annotations

from packmule.shapes.model import Block, Parameter

_LAYER = {
    "norm1.weight": "input_layernorm.weight",
    "q.weight": "self_attn.q_proj.weight",
    "k.weight": "self_attn.k_proj.weight",
    "v.weight": "self_attn.v_proj.weight",
    "o.weight": "self_attn.o_proj.weight",
    "norm2.weight": "post_attention_layernorm.weight",
    "gate.weight": "mlp.gate_proj.weight",
    "up.weight": "mlp.up_proj.weight",
    "down.weight": "mlp.down_proj.weight",
}
_EMBED = {"weight": "model.embed_tokens.weight"}
_HEAD = {"norm.weight": "model.norm.weight", "weight": "lm_head.weight"}


def hf_name(block: Block, parameter: Parameter) -> str:
    """The Hugging Face name of a block's own parameter."""
    if block.kind == "layer":
        return f"model.layers.{block.index - 1}.{_LAYER[parameter.name]}"
    return (_EMBED if block.kind == "embed" else _HEAD)[parameter.name]
