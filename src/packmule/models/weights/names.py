"""Block-local parameter names <-> tensors of a Hugging Face folder, by family.

A tensor there may hold several parameters one below the other (fused projections), and may lie
transposed (GPT-2's Conv1D stores inputs by outputs).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from packmule.shapes.blocks import Block, Parameter


@dataclass(frozen=True)
class Names:
    """One family's names, without ".weight" and ".bias".

    Attributes:
        layer: parameter -> name within a layer; parameters of one name lie in one tensor.
        embed, head: the same for these; "" is their own weight.
        layers: the list of layers.
        transposed: parameters whose weights lie transposed.
        prefix: what older files leave out at the beginning.
        ignored: endings of tensors that are no parameters.
        experts: the experts of a layer, and expert: what the parameters of one are called.
        replaced: parts of names that are others in files that hold experts stacked.
    """

    layer: Mapping[str, str]
    embed: Mapping[str, str]
    head: Mapping[str, str]
    layers: str = "model.layers"
    transposed: frozenset[str] = frozenset()
    prefix: str = ""
    ignored: tuple[str, ...] = ("rotary_emb.inv_freq",)
    experts: str = "mlp.experts"
    expert: Mapping[str, str] = field(
        default_factory=lambda: {name: f"{name}_proj" for name in ("gate", "up", "down")}
    )
    replaced: Mapping[str, str] = field(default_factory=dict)

    def stacked(self, name: str) -> str:
        """The name in files that hold experts stacked."""
        for part, other in self.replaced.items():
            name = name.replace(part, other)
        return name


_ATTENTION = {
    "norm1": "input_layernorm",
    **{name: f"self_attn.{name}_proj" for name in "qkvo"},
    **{name: f"self_attn.{name}" for name in ("q_norm", "k_norm")},
}
_MLP = {name: f"mlp.{name}_proj" for name in ("gate", "up", "down")}
_DENSE = {**_ATTENTION, "norm2": "post_attention_layernorm", **_MLP}
_GEMMA = {
    **_ATTENTION,
    "post1": "post_attention_layernorm",
    "norm2": "pre_feedforward_layernorm",
    **_MLP,
    "post2": "post_feedforward_layernorm",
}
_PHI3 = {
    **_DENSE,
    **dict.fromkeys("qkv", "self_attn.qkv_proj"),
    **dict.fromkeys(("gate", "up"), "mlp.gate_up_proj"),
}
_GPT2 = {
    "norm1": "ln_1",
    **dict.fromkeys("qkv", "attn.c_attn"),
    "o": "attn.c_proj",
    "norm2": "ln_2",
    "up": "mlp.c_fc",
    "down": "mlp.c_proj",
}
_EMBED = {"": "model.embed_tokens"}
_HEAD = {"norm": "model.norm", "": "lm_head"}

NAMES = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3"), Names(_DENSE, _EMBED, _HEAD)),
    **dict.fromkeys(("gemma2", "gemma3_text"), Names(_GEMMA, _EMBED, _HEAD)),
    "phi3": Names(_PHI3, _EMBED, _HEAD),
    "mixtral": Names(
        {**_DENSE, "router": "block_sparse_moe.gate"},
        _EMBED,
        _HEAD,
        experts="block_sparse_moe.experts",
        expert={"gate": "w1", "up": "w3", "down": "w2"},
        replaced={
            ".block_sparse_moe.": ".mlp.",
            ".w1.": ".gate_proj.",
            ".w2.": ".down_proj.",
            ".w3.": ".up_proj.",
        },
    ),
    "qwen3_moe": Names({**_DENSE, "router": "mlp.gate"}, _EMBED, _HEAD),
    "gpt2": Names(
        _GPT2,
        {"": "transformer.wte", "positions": "transformer.wpe"},
        {"norm": "transformer.ln_f", "": "lm_head"},
        layers="transformer.h",
        transposed=frozenset(("q", "k", "v", "o", "up", "down")),
        prefix="transformer.",
        ignored=(".attn.bias", ".attn.masked_bias"),
    ),
}


class HfTensor(NamedTuple):
    """One tensor of a Hugging Face folder and the parameters whose rows it holds, in order.

    Attributes:
        first, total: of a part of a vocabulary: where its rows begin, and how many the tensor has.
    """

    name: str
    parameters: tuple[Parameter, ...]
    transposed: bool
    first: int = 0
    total: int = 0

    @property
    def whole(self) -> tuple[int, ...]:
        """Its shape, not transposed."""
        first = self.parameters[0].shape
        return (self.total or sum(p.shape[0] for p in self.parameters), *first[1:])

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape in the folder."""
        return self.whole[::-1] if self.transposed else self.whole

    def rows(self, parameter: Parameter) -> slice:
        """Where a parameter's rows lie in `whole`."""
        start = self.first
        for other in self.parameters:
            if other == parameter:
                return slice(start, start + other.shape[0])
            start += other.shape[0]
        raise ValueError(f"{parameter.name} is not in {self.name}")


def hf_name(block: Block, parameter: Parameter) -> str:
    """The name of the Hugging Face tensor that holds a block's own parameter."""
    names, kind = NAMES[block.family], block.whole.kind
    stem, _, suffix = parameter.name.rpartition(".")
    if block.kind == "layer":
        return f"{names.layers}.{block.layer}.{names.layer[stem]}.{suffix}"
    if block.kind == "experts":
        expert, _, local = stem.partition(".")
        return f"{names.layers}.{block.layer}.{names.experts}.{expert}.{names.expert[local]}.{suffix}"
    return f"{(names.embed if kind == 'embed' else names.head)[stem]}.{suffix}"


def hf_tensors(block: Block) -> tuple[HfTensor, ...]:
    """The tensors that hold a block's own parameters; of a part of a vocabulary, its rows of them."""
    found: dict[str, list[Parameter]] = {}
    for parameter in block.parameters:
        found.setdefault(hf_name(block, parameter), []).append(parameter)
    return tuple(
        HfTensor(name, tuple(parameters), _transposed(block, parameters[0]), *_part(block, parameters[0]))
        for name, parameters in found.items()
    )


def _part(block: Block, parameter: Parameter) -> tuple[int, int]:
    """(first row, rows in all) of a vocabulary's part; of anything else (0, 0)."""
    if not block.tokens or parameter.name != "weight":
        return 0, 0
    return block.tokens.start, next(p.shape[0] for p in block.whole.parameters if p.name == "weight")


def hf_tensor(block: Block, parameter: Parameter) -> HfTensor:
    """The tensor that holds one of them."""
    return next(tensor for tensor in hf_tensors(block) if parameter in tensor.parameters)


def _transposed(block: Block, parameter: Parameter) -> bool:
    stem = parameter.name.rpartition(".")[0]
    return block.kind == "layer" and len(parameter.shape) == 2 and stem in NAMES[block.family].transposed
