"""The table of model families: how each `model_type` of a config.json reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from packmule.errors import ConfigError
from packmule.shapes.config import Config
from packmule.shapes.experts import MOST_EXPERTS, Experts, groups_of
from packmule.shapes.layer import LayerKind, Variant
from packmule.shapes.mlp import Activation
from packmule.shapes.rope import Rope, read_rope

ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}
"""Names in a config -> ours."""

MOST_LAYERS = 10_000
"""More than any model has: what a damaged file says must not fill the memory."""

_SLIDING, _FULL = "sliding_attention", "full_attention"


@dataclass(frozen=True)
class Family:
    """How one model_type reads.

    Attributes:
        architecture: what transformers calls its class.
        variant: what sets its layers apart from Llama's.
        kinds: what differs from layer to layer, one per layer.
        defaults: what transformers takes for keys that are left out.
        aliases: key -> its name in this family's files.
        ffn_factor: feed-forward width, in hidden sizes, where the file says none; None: it must say.
    """

    architecture: str
    variant: Callable[[Config], Variant]
    kinds: Callable[[Config], list[LayerKind]]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    ffn_factor: int | None = None

    def layer_kinds(self, config: Config) -> tuple[LayerKind, ...]:
        """One per layer, or none where every layer is plain."""
        kinds = self.kinds(config)
        return () if all(kind == LayerKind() for kind in kinds) else tuple(kinds)


# Parts of several families


def _activation(config: Config, key: str = "hidden_act") -> Activation:
    name = config.get(key)
    if not isinstance(name, str) or name not in ACTIVATIONS:
        raise config.unsupported(key, ACTIVATIONS)
    return ACTIVATIONS[name]


def _head_dim(config: Config) -> int:
    found = config.optional_integer("head_dim")
    return found or config.integer("hidden_size") // config.integer("num_attention_heads")


def _rope(config: Config, **options: Any) -> Rope | None:
    """None where it is the plain one, which ModelShape describes by itself."""
    head_dim = _head_dim(config)
    rope = read_rope(config, head_dim, **options)
    return None if rope == Rope(rope.theta, head_dim) else rope


def _layers(config: Config) -> range:
    return range(config.integer("num_hidden_layers", MOST_LAYERS))


def _everywhere(config: Config, kind: LayerKind) -> list[LayerKind]:
    return [kind for _ in _layers(config)]


def _layer_types(config: Config, otherwise: Sequence[str]) -> Sequence[str]:
    types = config.get("layer_types")
    if types is None:
        return otherwise
    if not isinstance(types, list) or len(types) != len(otherwise):
        raise config.wrong("layer_types", f"a list of {len(otherwise)} names")
    if not all(name in (_SLIDING, _FULL) for name in types):
        raise config.unsupported("layer_types", (_SLIDING, _FULL))
    return types


def _windows(config: Config, types: Sequence[str], window: int | None) -> list[int | None]:
    return [window if name == _SLIDING else None for name in types]


# Families


def _llama(config: Config) -> Variant:
    bias = config.flag("attention_bias")
    return Variant(
        activation=_activation(config), qkv_bias=bias, o_bias=bias, mlp_bias=config.flag("mlp_bias")
    )


def _llama_kinds(config: Config) -> list[LayerKind]:
    return _everywhere(config, LayerKind(rope=_rope(config)))


def _mistral(config: Config) -> Variant:
    return Variant(activation=_activation(config))


def _mistral_kinds(config: Config) -> list[LayerKind]:
    window = config.optional_integer("sliding_window")
    return _everywhere(config, LayerKind(window=window, rope=_rope(config)))


def _qwen2(config: Config) -> Variant:
    return Variant(activation=_activation(config), qkv_bias=True)


def _qwen_kinds(config: Config) -> list[LayerKind]:
    window = config.optional_integer("sliding_window") if config.flag("use_sliding_window") else None
    full = config.get("max_window_layers")
    if isinstance(full, bool) or not isinstance(full, int) or full < 0:
        raise config.wrong("max_window_layers", "a whole number")
    layers = _layers(config)
    types = _layer_types(config, [_SLIDING if window and i >= full else _FULL for i in layers])
    rope = _rope(config)
    return [LayerKind(window=one, rope=rope) for one in _windows(config, types, window)]


def _qwen3(config: Config) -> Variant:
    bias = config.flag("attention_bias")
    return Variant(activation=_activation(config), qkv_bias=bias, o_bias=bias, qk_norm=True)


def _experts(config: Config, width: str, renormalize: bool) -> Experts:
    """A mixture of experts; `width` names the key of one's feed-forward width."""
    # transformers 5 writes the first name for every family.
    count = config.optional_integer("num_local_experts") or config.integer("num_experts")
    chosen, hidden = config.integer("num_experts_per_tok"), config.integer("hidden_size")
    if chosen > count or count > MOST_EXPERTS:
        raise ConfigError(
            f"{config.source}: {chosen} of {count} experts per token are not supported.",
            f"at most {MOST_EXPERTS} experts, and no more per token than there are",
        )
    return Experts(
        count=count,
        chosen=chosen,
        width=config.integer(width),
        renormalize=renormalize,
        balance=config.factor("router_aux_loss_coef"),
        groups=groups_of(count, hidden, config.integer(width)),
        activation=_activation(config),
    )


def _mixtral_kinds(config: Config) -> list[LayerKind]:
    config.refuse("router_jitter_noise")
    window = config.optional_integer("sliding_window")
    experts = _experts(config, "intermediate_size", renormalize=True)
    return _everywhere(config, LayerKind(window=window, rope=_rope(config), feed_forward=experts))


def _qwen3_moe_kinds(config: Config) -> list[LayerKind]:
    """Every `decoder_sparse_step`-th layer has experts, unless it is listed as dense."""
    window = config.optional_integer("sliding_window") if config.flag("use_sliding_window") else None
    dense = config.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(isinstance(layer, int) for layer in dense):
        raise config.wrong("mlp_only_layers", "a list of layer numbers")
    step, plain = config.integer("decoder_sparse_step"), LayerKind(window=window, rope=_rope(config))
    experts = _experts(config, "moe_intermediate_size", config.flag("norm_topk_prob"))
    return [
        plain if layer in dense or (layer + 1) % step else replace(plain, feed_forward=experts)
        for layer in range(config.integer("num_hidden_layers"))
    ]


def _phi3_kinds(config: Config) -> list[LayerKind]:
    rope = _rope(config, partial=True, names={"su": "longrope", "yarn": "longrope"})
    window = config.optional_integer("sliding_window")
    return _everywhere(config, LayerKind(window=window, rope=rope))


def _gemma2(config: Config) -> Variant:
    config.refuse("use_bidirectional_attention")
    bias = config.flag("attention_bias")
    return Variant(
        activation=_activation(config, "hidden_activation"),
        norm_offset=1.0,
        post_norms=True,
        qkv_bias=bias,
        o_bias=bias,
        attention_cap=config.optional_number("attn_logit_softcapping"),
        logit_cap=config.optional_number("final_logit_softcapping"),
        embedding_scale=config.integer("hidden_size") ** 0.5,
    )


def _gemma_kinds(config: Config, pattern: int, ropes: Mapping[str, Rope | None]) -> list[LayerKind]:
    """Of every `pattern` layers the last sees everything."""
    layers = _layers(config)
    types = _layer_types(config, [_SLIDING if (i + 1) % pattern else _FULL for i in layers])
    windows = _windows(config, types, config.optional_integer("sliding_window"))
    scale = config.number("query_pre_attn_scalar", 256) ** -0.5
    return [
        LayerKind(window=window, rope=ropes[name], scale=scale)
        for name, window in zip(types, windows, strict=True)
    ]


def _gemma2_kinds(config: Config) -> list[LayerKind]:
    return _gemma_kinds(config, 2, dict.fromkeys((_SLIDING, _FULL), _rope(config)))


def _gemma3(config: Config) -> Variant:
    return replace(_gemma2(config), qk_norm=True)


def _gemma3_kinds(config: Config) -> list[LayerKind]:
    """Layers with a window have a rotary embedding of their own."""
    given = config.section("rope_parameters")
    full = config.section("rope_scaling") if config.get("rope_scaling") else given.section(_FULL)
    local = config.number("rope_local_base_freq", 1e4)
    ropes = {
        _FULL: read_rope(config, _head_dim(config), full, given.section(_FULL).optional_number("rope_theta")),
        _SLIDING: read_rope(config, _head_dim(config), given.section(_SLIDING), local),
    }
    return _gemma_kinds(config, config.optional_integer("sliding_window_pattern") or 6, ropes)


def _gpt2(config: Config) -> Variant:
    config.refuse("add_cross_attention")
    if config.integer("hidden_size") % config.integer("num_attention_heads"):
        raise ConfigError(
            f"{config.source}: n_embd {config.get('hidden_size')} is not a multiple of "
            f"n_head {config.get('num_attention_heads')}.",
            "restore the model's own config.json",
        )
    return Variant(
        activation=_activation(config),
        gated=False,
        norm="layer",
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        learned_positions=True,
        residual_start=(2 * len(_layers(config))) ** -0.5,
    )


def _gpt2_kinds(config: Config) -> list[LayerKind]:
    scale = _head_dim(config) ** -0.5 if config.flag("scale_attn_weights") else 1.0
    layers = _layers(config)
    if config.flag("scale_attn_by_inverse_layer_idx"):
        return [LayerKind(scale=scale / (i + 1)) for i in layers]
    return [LayerKind() if config.flag("scale_attn_weights") else LayerKind(scale=scale) for _ in layers]


_COMMON = {"hidden_act": "silu", "rms_norm_eps": 1e-6, "max_position_embeddings": 2048}
_QWEN = {
    **_COMMON,
    "max_position_embeddings": 32768,
    "num_key_value_heads": 32,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
_GEMMA = {
    "hidden_activation": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-6,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}

FAMILIES: dict[str, Family] = {
    "llama": Family("LlamaForCausalLM", _llama, _llama_kinds, _COMMON),
    "mistral": Family(
        "MistralForCausalLM",
        _mistral,
        _mistral_kinds,
        {
            **_COMMON,
            "max_position_embeddings": 4096 * 32,
            "num_key_value_heads": 8,
            "sliding_window": 4096,
        },
    ),
    "qwen2": Family("Qwen2ForCausalLM", _qwen2, _qwen_kinds, _QWEN),
    "qwen3": Family("Qwen3ForCausalLM", _qwen3, _qwen_kinds, {**_QWEN, "head_dim": 128}),
    "mixtral": Family(
        "MixtralForCausalLM",
        _mistral,
        _mixtral_kinds,
        {
            **_COMMON,
            "max_position_embeddings": 4096 * 32,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "router_aux_loss_coef": 0.001,
        },
    ),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        _qwen3,
        _qwen3_moe_kinds,
        {
            **_COMMON,
            "max_position_embeddings": 32768,
            "num_key_value_heads": 4,
            "sliding_window": 4096,
            "intermediate_size": 6144,
            "moe_intermediate_size": 768,
            "decoder_sparse_step": 1,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "router_aux_loss_coef": 0.001,
        },
    ),
    "phi3": Family(
        "Phi3ForCausalLM",
        _mistral,
        _phi3_kinds,
        {
            **_COMMON,
            "max_position_embeddings": 4096,
            "original_max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
        },
    ),
    "gemma2": Family(
        "Gemma2ForCausalLM",
        _gemma2,
        _gemma2_kinds,
        {
            **_GEMMA,
            "max_position_embeddings": 8192,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
    ),
    "gemma3_text": Family(
        "Gemma3ForCausalLM",
        _gemma3,
        _gemma3_kinds,
        {**_GEMMA, "max_position_embeddings": 131072, "rope_theta": 1e6},
    ),
    "gpt2": Family(
        "GPT2LMHeadModel",
        _gpt2,
        _gpt2_kinds,
        {
            "hidden_act": "gelu_new",
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 1024,
            "scale_attn_weights": True,
            "tie_word_embeddings": True,
        },
        {
            "hidden_size": "n_embd",
            "num_hidden_layers": "n_layer",
            "num_attention_heads": "n_head",
            "intermediate_size": "n_inner",
            "max_position_embeddings": "n_positions",
            "rms_norm_eps": "layer_norm_epsilon",
            "hidden_act": "activation_function",
        },
        ffn_factor=4,
    ),
}
