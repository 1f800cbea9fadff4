"""The architectures of GGUF files: their names for tensors, beside Hugging Face's, in both directions.

GGUF's names are those of llama.cpp (gguf-py/gguf/constants.py); what it does to values is in its
convert_hf_to_gguf.py. Settings are mapped in gguf_config (read) and gguf_metadata (written).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from packmule.data.gguf import GgufHeader
from packmule.errors import DataError

_ATTENTION = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
_HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_MLP = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_DENSE = {**_ATTENTION, "ffn_norm": "post_attention_layernorm", **_MLP}
_GEMMA = {
    **_ATTENTION,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    **_MLP,
    "post_ffw_norm": "post_feedforward_layernorm",
}
_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}

COMPUTED = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Tensors that follow from config.json: no parameters."""


@dataclass(frozen=True)
class GgufFamily:
    """One architecture's names.

    Attributes:
        architecture: the file's general.architecture, and the prefix of its keys.
        model_type: that of config.json.
        causal_class: transformers' class, for config.json.
        layer: the name within `blk.N.` -> that within Hugging Face's layer, without .weight or .bias.
        top: the same for what is in no layer.
        layers: Hugging Face's name of the list of layers.
        experts: the tensors of `layer` that hold all experts; `{}` in its value is the expert's number.
        interleaved: q and k lie in GGUF's RoPE order (LlamaModel.permute in llama.cpp's converter).
        norm_offset: added to each norm's weight in the file; Gemma's norms multiply by 1 + weight.
    """

    architecture: str
    model_type: str
    causal_class: str
    layer: Mapping[str, str]
    top: Mapping[str, str] = field(default_factory=lambda: _TOP)
    layers: str = "model.layers"
    experts: frozenset[str] = frozenset()
    interleaved: bool = False
    norm_offset: float = 0.0

    def huggingface_name(self, name: str, expert: int | None = None) -> str | None:
        """The Hugging Face name of a GGUF tensor, or None; of one expert's part where it holds several."""
        stem, _, suffix = name.rpartition(".")
        if stem in self.top:
            return f"{self.top[stem]}.{suffix}"
        match = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
        if match is None or match[2] not in self.layer:
            return None
        return f"{self.layers}.{match[1]}.{self.layer[match[2]].format(expert)}.{suffix}"

    def gguf_name(self, name: str) -> tuple[str, int | None] | None:
        """The GGUF name of a Hugging Face tensor and the expert's number in it, or None."""
        stem, _, suffix = name.rpartition(".")
        for ours, theirs in self.top.items():
            if theirs == stem:
                return f"{ours}.{suffix}", None
        match = re.fullmatch(rf"{re.escape(self.layers)}\.(\d+)\.(.+)", stem)
        if match is None:
            return None
        for ours, theirs in self.layer.items():
            found = re.fullmatch(re.escape(theirs).replace(r"\{\}", r"(\d+)"), match[2])
            if found:
                return f"blk.{match[1]}.{ours}.{suffix}", int(found[1]) if ours in self.experts else None
        return None

    def leaf(self, name: str) -> str:
        """A GGUF tensor's name within its layer, without .weight or .bias."""
        return name.rpartition(".")[0].rpartition(".")[2]


_QWEN_EXPERTS = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
}
_MIXTRAL_EXPERTS = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
    "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
    "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
}
_EXPERTS = frozenset({"ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"})
_ROUTED = {name: value for name, value in _DENSE.items() if name not in _MLP}

FAMILIES = (
    GgufFamily("llama", "llama", "LlamaForCausalLM", _DENSE, interleaved=True),
    GgufFamily("llama", "mistral", "MistralForCausalLM", _DENSE, interleaved=True),
    GgufFamily(
        "llama",
        "mixtral",
        "MixtralForCausalLM",
        {**_ROUTED, **_MIXTRAL_EXPERTS},
        experts=_EXPERTS,
        interleaved=True,
    ),
    GgufFamily("qwen2", "qwen2", "Qwen2ForCausalLM", _DENSE),
    GgufFamily("qwen3", "qwen3", "Qwen3ForCausalLM", {**_DENSE, **_HEAD_NORMS}),
    GgufFamily(
        "qwen3moe",
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        {**_ROUTED, **_HEAD_NORMS, **_QWEN_EXPERTS},
        experts=_EXPERTS,
    ),
    GgufFamily("gemma2", "gemma2", "Gemma2ForCausalLM", _GEMMA, norm_offset=1.0),
    GgufFamily("gemma3", "gemma3_text", "Gemma3ForCausalLM", {**_GEMMA, **_HEAD_NORMS}, norm_offset=1.0),
    GgufFamily(
        "phi3",
        "phi3",
        "Phi3ForCausalLM",
        {
            "attn_norm": "input_layernorm",
            "attn_qkv": "self_attn.qkv_proj",
            "attn_output": "self_attn.o_proj",
            "ffn_norm": "post_attention_layernorm",
            "ffn_up": "mlp.gate_up_proj",
            "ffn_down": "mlp.down_proj",
        },
    ),
    GgufFamily(
        "gpt2",
        "gpt2",
        "GPT2LMHeadModel",
        {
            "attn_norm": "ln_1",
            "attn_qkv": "attn.c_attn",
            "attn_output": "attn.c_proj",
            "ffn_norm": "ln_2",
            "ffn_up": "mlp.c_fc",
            "ffn_down": "mlp.c_proj",
        },
        top={
            "token_embd": "transformer.wte",
            "position_embd": "transformer.wpe",
            "output_norm": "transformer.ln_f",
            "output": "lm_head",
        },
        layers="transformer.h",
    ),
)


def family_of_file(header: GgufHeader) -> GgufFamily:
    """The family of a file.

    Raises:
        DataError: an architecture that is not in the table.
    """
    architecture = header.require("general.architecture")
    known = [family for family in FAMILIES if family.architecture == architecture]
    if not known:
        names = ", ".join(sorted({family.architecture for family in FAMILIES}))
        raise DataError(
            f"{header.path}: architecture {architecture!r:.80} is not supported.", f"supported: {names}"
        )
    experts = header.metadata.get(f"{architecture}.expert_count", 0) != 0
    window = header.metadata.get(f"{architecture}.attention.sliding_window", 0) != 0
    chosen = [family for family in known if bool(family.experts) == experts]
    if not chosen:
        raise DataError(
            f"{header.path}: {architecture} with{'' if experts else 'out'} experts is not supported.",
            "give the model's Hugging Face folder",
        )
    # Mistral's files say llama; only the window tells them apart, and without it they compute the same
    return chosen[-1 if window else 0]


def family_of_config(model_type: object) -> GgufFamily | None:
    """The family of a config.json's model_type, or None where GGUF files of it are not written."""
    return next((family for family in FAMILIES if family.model_type == model_type), None)
