"""transformers as the autograd oracle of the bodies, for every architecture of the table."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import transformers
from tests.parity.architectures import Config
from tests.parity.plain import Named, PlainModel
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from packmule.models.weights.names import NAMES, hf_tensors
from packmule.shapes.families import FAMILIES


class InFloat64(TorchFunctionMode):
    """Whatever asks for float32 gets float64: norms, softmax and rotary tables of transformers take
    a detour through float32, whatever the model's dtype."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        def wide(value: Any) -> Any:
            return torch.float64 if value is torch.float32 else value

        func = torch.Tensor.double if func is torch.Tensor.float else func
        return func(*map(wide, args), **{name: wide(value) for name, value in (kwargs or {}).items()})


def build(config: Config, dtype: torch.dtype) -> transformers.PreTrainedModel:
    """The model of a config.json with random weights."""
    kind = config["model_type"]
    hf_config = transformers.AutoConfig.for_model(
        kind, **{key: value for key, value in config.items() if key != "model_type"}
    )
    hf_config.use_cache = False
    hf_config._attn_implementation = hf_config._experts_implementation = "eager"
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        # Dropout is off, as in our bodies.
        return getattr(transformers, FAMILIES[kind].architecture)(hf_config).eval()
    finally:
        torch.set_default_dtype(before)


def state_of(model: PlainModel) -> Named:
    """The model's parameters under their Hugging Face names, as they lie there."""
    state = {}
    for block, named in zip(model.blocks, model.params, strict=True):
        for tensor in hf_tensors(block):
            whole = torch.cat([named[p.name] for p in tensor.parameters])
            state[tensor.name] = whole.t().contiguous() if tensor.transposed else whole
    return state


EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")


def stacked(model: PlainModel, state: Named) -> Named:
    """The state as transformers keeps it in memory: the experts of a layer in two tensors."""
    found: Named = {}
    layers: dict[str, dict[tuple[int, str], Tensor]] = {}
    for name, value in state.items():
        name = NAMES[model.shape.family].stacked(name)
        match = EXPERT.fullmatch(name)
        if match is None:
            found[name] = value
        else:
            layers.setdefault(match[1], {})[int(match[2]), match[3]] = value
    for layer, named in layers.items():
        count = len(named) // 3
        both = [torch.cat((named[e, "gate"], named[e, "up"])) for e in range(count)]
        found[f"{layer}.gate_up_proj"] = torch.stack(both)
        found[f"{layer}.down_proj"] = torch.stack([named[e, "down"] for e in range(count)])
    return found


def unstacked(family: str, tensors: Mapping[str, Tensor], name: str) -> Tensor:
    """The tensor of a Hugging Face name among those that transformers keeps in memory."""
    name = NAMES[family].stacked(name)
    match = EXPERT.fullmatch(name)
    if match is None:
        return tensors[name]
    if match[3] == "down":
        return tensors[f"{match[1]}.down_proj"][int(match[2])]
    return tensors[f"{match[1]}.gate_up_proj"][int(match[2])].chunk(2)[match[3] == "up"]


def oracle(model: PlainModel, config: Config) -> transformers.PreTrainedModel:
    """The same weights in transformers, in the model's master dtype."""
    twin = build(config, torch.float64 if model.types.master == "float64" else torch.float32)
    missing, unexpected = twin.load_state_dict(stacked(model, state_of(model)), strict=False)
    assert not unexpected
    assert missing == (["lm_head.weight"] if model.shape.tied else [])
    return twin


def gradients(model: PlainModel, twin: transformers.PreTrainedModel) -> list[Named]:
    """The twin's gradients by block and our names."""
    return by_block(model, {name: p.grad for name, p in twin.named_parameters() if p.grad is not None})


def by_block(model: PlainModel, tensors: Mapping[str, Tensor]) -> list[Named]:
    """What transformers keeps by its names (parameters or gradients) by block and our names."""
    found: list[Named] = []
    for block in model.blocks:
        named: Named = {}
        for tensor in hf_tensors(block):
            value = unstacked(model.shape.family, tensors, tensor.name)
            whole = value.t() if tensor.transposed else value
            named.update({p.name: whole[tensor.rows(p)] for p in tensor.parameters})
        found.append(named)
    return found


def oracle_step(
    model: PlainModel, config: Config, documents: Sequence[Tensor]
) -> tuple[float, list[Named], list[Tensor]]:
    """Mean next-token loss over all targets, gradients by block, logits of every document.

    Documents run one by one, so what depends on a text's length (LongRope) is each one's own. The
    load-balancing loss of experts, over all of them, is in the gradients alone.
    """
    exact = model.types.master == "float64"
    with torch.enable_grad(), InFloat64() if exact else torch.enable_grad():
        twin = oracle(model, config)
        rows, total = [], torch.zeros(())
        routers: list[tuple[Tensor, ...]] = []
        for document in documents:
            result = twin(input_ids=document[None], **router_logits(twin))
            logits = result.logits[0]
            routers.append(result.get("router_logits") or ())
            loss = torch.nn.functional.cross_entropy(logits[:-1], document[1:], reduction="sum")
            total = total + loss
            rows.append(logits.detach())
        total = total / sum(len(document) - 1 for document in documents)
        (total + balance_loss(twin, routers)).backward()
    return float(total.detach()), gradients(model, twin), rows


def router_logits(twin: transformers.PreTrainedModel) -> dict[str, bool]:
    """What a model with experts is asked for besides."""
    return {"output_router_logits": True} if hasattr(twin, "router_aux_loss_coef") else {}


def balance_loss(twin: transformers.PreTrainedModel, routers: Sequence[tuple[Tensor, ...]]) -> Tensor | float:
    """The load-balancing loss times its factor, over all documents; per document its routers' logits."""
    if not hasattr(twin, "router_aux_loss_coef"):
        return 0.0
    logits = tuple(torch.cat(layer) for layer in zip(*routers, strict=True))
    loss = load_balancing_loss_func(logits, twin.num_experts, twin.num_experts_per_tok)
    return twin.router_aux_loss_coef * loss
