"""How a job's values are read: the types of its fields, forgiving of spelling, strict in meaning.

Each reader takes what YAML, JSON or a flag gives and raises ValueError with what to write instead;
pydantic adds the field's name and value.
"""

from __future__ import annotations

import math
import re
from pathlib import PurePath
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from packmule.errors import ConfigError
from packmule.spec.growth import Scaling
from packmule.spec.plan import RuleName
from packmule.spec.turns import Order
from packmule.spec.units import parse_bytes

Where = Literal["auto", "ram", "disk"]

_FORMATS = {
    **dict.fromkeys(("chat", "chatml", "openai", "conversational"), "messages"),
    **dict.fromkeys(("completion", "prompt-response"), "prompt-completion"),
    **dict.fromkeys(("tokenized", "pretokenized", "pre-tokenized", "input-ids"), "tokens"),
    **dict.fromkeys(("instruction", "instruct"), "alpaca"),
    "conversations": "sharegpt", "pretraining": "text", "plain": "text", "dpo": "preference",
}  # fmt: skip
SINKS = ("tensorboard", "wandb", "trackio")
"""Where metrics can be sent besides log.jsonl."""

FACTORY = re.compile(r"([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*|.+\.py):([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)")
"""`module:function` or `file.py:function`: where a function of the user's own is, and its name."""

_PRECISIONS = {
    "auto": "auto",
    **dict.fromkeys(("fp32", "float32", "float", "32", "32-true", "no"), "fp32"),
    **dict.fromkeys(("bf16-mixed", "bf16", "bfloat16"), "bf16-mixed"),
    **dict.fromkeys(("fp64", "float64", "double", "64", "64-true"), "fp64"),
}


def _device(value: Any) -> Any:
    name = "cuda:0" if value == "cuda" else str(value)
    if not re.fullmatch(r"cpu|auto|fake|cuda:\d+", name):
        raise ValueError("give `cpu`, `auto`, `fake` or a GPU like `cuda:0`")
    return name


def _auto_count(value: Any) -> Any:
    if value is None or value == "auto":
        return "auto"
    count = count_of(value)
    if count is None or count < 1:
        raise ValueError("give `auto` or a whole number of at least 1")
    return count


def count_of(value: Any) -> int | None:
    """The whole number a value or text means, or None."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    whole = not isinstance(value, bool) and math.isfinite(number) and number == int(number)
    return int(number) if whole else None


def _auto_bytes(value: Any) -> Any:
    if value is None or value == "auto":
        return "auto"
    try:
        return parse_bytes(value)
    except ConfigError as error:
        raise ValueError(error.hint) from None


def _auto_flag(value: Any) -> Any:
    if value is None or str(value).lower() == "auto":
        return "auto"
    flag = {"true": True, "on": True, "yes": True, "false": False, "off": False, "no": False}
    if (text := str(value).lower()) in flag:
        return flag[text]
    raise ValueError("give `auto`, `true` or `false`")


def unset_if_minus_one(value: Any) -> Any:
    """None for -1, which Hugging Face writes for "not set"."""
    return None if not isinstance(value, bool) and value in (-1, "-1", -1.0) else value


def _val_size(value: Any) -> Any:
    try:
        size = float(value)
    except (TypeError, ValueError):
        raise ValueError("give a share of the data like 0.02, or a number of documents like 100") from None
    if isinstance(value, bool) or not math.isfinite(size) or size < 0 or (size >= 1 and size != int(size)):
        raise ValueError("give a share of at least 0 and below 1, or a whole number of documents")
    return int(size) if size >= 1 or (isinstance(value, int) and size == 0) else size


def _precision(value: Any) -> Any:
    text = str(value).lower().replace("_", "-")
    if text in ("fp16", "float16", "half", "16-mixed", "16-true", "bf16-true"):
        raise ValueError("is not offered; `bf16-mixed` computes in bf16 and keeps fp32 masters")
    return _PRECISIONS.get(text, value)


def _paths(value: Any) -> Any:
    if value is None:
        return ()
    return (value,) if isinstance(value, str) else value


def _factory(value: Any) -> Any:
    if value is None or (isinstance(value, str) and FACTORY.fullmatch(value)):
        return value
    raise ValueError("name a function: `module:function`, or `path/to/file.py:function`")


def _sources(value: Any) -> Any:
    if value is None:
        return ()
    entries = [value] if isinstance(value, (str, dict)) else value
    if isinstance(entries, (list, tuple)) and any(isinstance(entry, dict) for entry in entries):
        return [entry if isinstance(entry, dict) else {"path": entry} for entry in entries]
    return entries


def _named(value: Any) -> Any:
    """Validation data as {name, path} entries: from a path, several, or a mapping of names."""
    if value is None or value in ((), []):
        return ()
    if isinstance(value, dict) and not {"name", "path"} >= value.keys():
        return [{"name": str(name), "path": path} for name, path in value.items()]
    entries = [value] if isinstance(value, (str, dict)) else value
    if not isinstance(entries, (list, tuple)):
        return value
    single = len(entries) == 1
    return [
        {"name": "validation" if single else file_stem(entry), "path": entry}
        if isinstance(entry, str)
        else entry
        for entry in entries
    ]


def file_stem(path: str) -> str:
    """The name of a file without its suffixes: "code" of "data/code.jsonl.gz"."""
    return PurePath(path).name.split(".")[0] or path


def _format(value: Any) -> Any:
    name = str(value).lower().replace("_", "-")
    return _FORMATS.get(name, name)


def _train_on(value: Any) -> Any:
    return {"true": "all", "false": "assistant"}.get(str(value).lower(), value)


def _similarity(value: Any) -> Any:
    if value is None or str(value).lower() in ("false", "no", "off"):
        return None
    return 0.8 if value is True or str(value).lower() in ("true", "yes", "on") else value


def _metric(value: Any) -> Any:
    """Other tools leave the prefix out or write it with an underscore."""
    if not isinstance(value, str):
        return value
    text = value.strip().removeprefix("eval_").removeprefix("eval/")
    return f"eval/{text}"


def _clip(value: Any) -> Any:
    off = isinstance(value, (int, float)) and not isinstance(value, bool) and value <= 0
    return None if off else value


def _positive_clip(value: float | None) -> float | None:
    return value if value is None or value > 0 else None


def _resume(value: Any) -> Any:
    words = {"true": "auto", "false": "never", "none": "never", "auto": "auto", "never": "never"}
    return words.get(str(value).lower(), value)


def _report_to(value: Any) -> Any:
    names = [part.strip() for part in value.split(",")] if isinstance(value, str) else value
    if names is None or not isinstance(names, (list, tuple)):
        return names or ()
    kept = [name for name in names if name not in ("none", "jsonl", "")]  # JSON lines always are written
    for name in kept:
        if name not in SINKS:
            raise ValueError(f"{name!r} is not offered: {', '.join(SINKS)}; log.jsonl is always written")
    return tuple(dict.fromkeys(kept))


def _optimizer(value: Any) -> Any:
    name = str(value).lower()
    return "adamw" if name in ("adamw_torch", "adamw_torch_fused") else name


def _scheduler(value: Any) -> Any:
    names = {"constant_with_warmup": "constant", "warmup_stable_decay": "wsd"}
    return names.get(value, value) if isinstance(value, str) else value


def _block_order(value: Any) -> Any:
    """The names of HiFT and BAdam for the same orders."""
    names = {
        **dict.fromkeys(("bottom2up", "down2up"), "ascending"),
        **dict.fromkeys(("top2down", "up2down"), "descending"),
    }
    text = str(value).lower().replace("_", "").replace("-", "")
    return names.get(text, value)


def _off(value: Any) -> Any:
    return "off" if value is None or value is False else value


AutoCount = Annotated[int | Literal["auto"], BeforeValidator(_auto_count)]
DeviceName = Annotated[str, BeforeValidator(_device)]
"""What computes: the cores, the first GPU where there is one, a GPU, or the fake device."""
AutoFlag = Annotated[bool | Literal["auto"], BeforeValidator(_auto_flag)]
AutoBytes = Annotated[int | Literal["auto"], BeforeValidator(_auto_bytes)]
Steps = Annotated[int | None, Field(ge=1), BeforeValidator(unset_if_minus_one)]
OptionalText = Annotated[str | None, Field(min_length=1)]
Text = Annotated[str, Field(min_length=1)]
Paths = Annotated[tuple[Text, ...], BeforeValidator(_paths)]
Factory = Annotated[str | None, BeforeValidator(_factory)]
FormatName = Annotated[
    Literal["auto", "text", "alpaca", "sharegpt", "messages", "prompt-completion", "preference", "tokens"],
    BeforeValidator(_format),
]
TrainOn = Annotated[Literal["assistant", "all"], BeforeValidator(_train_on)]
Similarity = Annotated[float | None, Field(gt=0, le=1), BeforeValidator(_similarity)]
ReadSources = BeforeValidator(_sources)
ReadNamed = BeforeValidator(_named)
ValSize = Annotated[int | float, BeforeValidator(_val_size)]
MetricName = Annotated[Text, BeforeValidator(_metric)]
PrecisionName = Annotated[Literal["auto", "fp32", "bf16-mixed", "fp64"], BeforeValidator(_precision)]
UpdateName = Literal["auto", "after-backward", "on-backward", "on-fetch"]
OptimizerName = Annotated[RuleName, BeforeValidator(_optimizer)]
SchedulerName = Annotated[Literal["constant", "linear", "cosine", "wsd"], BeforeValidator(_scheduler)]
BlockOrder = Annotated[Order, BeforeValidator(_block_order)]
ScalingName = Annotated[Scaling, BeforeValidator(_off)]
Clip = Annotated[float | None, BeforeValidator(_clip), AfterValidator(_positive_clip)]
ResumeFrom = Annotated[Text, BeforeValidator(_resume)]
ReportTo = Annotated[tuple[Text, ...], BeforeValidator(_report_to)]
