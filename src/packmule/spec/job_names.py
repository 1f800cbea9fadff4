"""Names other tools use for the fields of a job, and what becomes of them. A table, no code paths.

`ALIASES` are renamed, `CONVERTED` change their value too, `FIXED` have only one setting here,
`REFUSED` say why there is no such field. Keys are in snake case; '-' and '_' are alike to the user.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_BY_FIELD = {
    "model.path": "model_name_or_path base_model checkpoint_dir model_path model_name",
    "model.factory": "model_factory",
    "data.factory": "data_factory dataset_factory",
    "data.path": "dataset dataset_name dataset_path datasets local_dataset train_file",
    "data.format": "dataset_format",
    "data.chat_template": "template chat_template_path",
    "data.deduplicate": "dedup deduplication near_duplicates",
    "data.long_documents": "long_sequences excess_length_strategy overlong",
    "data.val_factory": "eval_factory eval_dataset_factory val_dataset_factory",
    "data.val_size": "val_set_size validation_split test_size",
    "data.val_path": "validation_file eval_dataset val_dataset",
    "train.best_metric": "metric_for_best_model",
    "train.early_stop_patience": "early_stopping_patience",
    "train.early_stop_min_delta": "early_stopping_threshold early_stopping_min_delta",
    "train.max_minutes": "max_time_minutes",
    "optim.decay_steps": "num_decay_steps lr_decay_steps",
    "train.output_dir": "out_dir output",
    "train.max_seq_length": "max_length cutoff_len sequence_len seq_length block_size model_max_length",
    "train.global_batch_size": "train_batch_size",
    "train.micro_batch_size": "per_device_train_batch_size train_micro_batch_size_per_gpu",
    "train.gradient_accumulation_steps": "accumulate_grad_batches",
    "train.epochs": "num_train_epochs num_epochs",
    "train.recompute": "gradient_checkpointing activation_checkpointing recomputation",
    "train.precision": "dtype torch_dtype",
    "train.seed": "random_seed",
    "train.eval_steps": "eval_interval",
    "train.router_aux_loss_coef": "moe_aux_loss_coef aux_loss_coef",
    "optim.optim": "optimizer",
    "optim.learning_rate": "lr",
    "optim.lr_scheduler": "lr_scheduler_type scheduler",
    "optim.warmup_steps": "lr_warmup_steps num_warmup_steps warmup_iters",
    "optim.min_lr": "min_learning_rate lr_min",
    "optim.weight_decay": "wd",
    "optim.max_grad_norm": "max_norm grad_clip clip_grad_norm gradient_clipping gradient_clip_val clip",
    "optim.block_layers": "group_element hift_group_size",
    "optim.block_steps": "badam_switch_interval switch_block_every",
    "optim.block_order": "badam_switch_mode switch_mode optimizer_strategy",
    "optim.adam_beta1": "beta1",
    "optim.adam_beta2": "beta2",
    "optim.adam_epsilon": "eps adam_eps epsilon",
    "checkpoint.save_steps": "save_interval snapshot_steps",
    "checkpoint.resume": "resume_from_checkpoint auto_resume_from_checkpoints",
    "hardware.ram": "ram_bytes memory",
    "hardware.disk_path": "disk offload_dir offload_folder nvme_path",
    "hardware.threads": "num_threads",
    "hardware.device_memory": "gpu_memory max_gpu_memory gpu_memory_limit",
    "logging.logging_steps": "log_interval log_every_n_steps",
    "logging.report_to": "logger_name",
}

ALIASES: dict[str, str] = {alias: field for field, names in _BY_FIELD.items() for alias in names.split()}
"""alias -> dotted field."""

SECTION_ALIASES = {"training": "train", "dataset": "data", "optimizer": "optim"}
"""Section names of other tools."""

MAIN_FIELD = {"model": "path", "data": "path", "optim": "optim"}
"""The field a section's name stands for when its value is no mapping: `model: ./folder`."""

FIXED: dict[str, tuple[tuple[str, ...], str]] = {
    "packing": (("true",), "rows are always packed, and attention never crosses documents"),
    "sample_packing": (("true",), "rows are always packed, and attention never crosses documents"),
    "neat_packing": (("true",), "rows are always packed, and attention never crosses documents"),
    "fp16": (("false", "null"), "fp16 is not offered; `train.precision: bf16-mixed` needs no loss scaling"),
    "load_in_8bit": (("false", "null"), "weights are trained in full precision"),
    "load_in_4bit": (("false", "null"), "weights are trained in full precision"),
    "adapter": (("null",), "all parameters are trained; there are no adapters yet"),
    "finetuning_type": (("full",), "all parameters are trained; there are no adapters yet"),
    "stage": (("pt", "sft"), "the data decides: conversations and prompts carry loss on answers only"),
    "do_train": (("true",), "`packmule train` trains"),
    "do_eval": (("true", "false"), "evaluation follows `train.eval_steps`"),
    "eval_strategy": (("steps", "no", "false"), "evaluation follows `train.eval_steps`"),
    "evaluation_strategy": (("steps", "no", "false"), "evaluation follows `train.eval_steps`"),
    "save_strategy": (("steps", "no", "false"), "snapshots follow `checkpoint.save_steps`"),
    "logging_strategy": (("steps",), "logging follows `logging.logging_steps`"),
    "gradient_checkpointing_kwargs": (("*",), "recomputation needs no settings"),
}
"""name -> (values that change nothing and are accepted with a note, "*" for any; why)."""


def _flag_to_precision(precision: str) -> Callable[[Any], tuple[str, Any] | None]:
    def convert(value: Any) -> tuple[str, Any] | None:
        if value is None or str(value).lower() in ("false", "no", "off"):
            return None
        on = str(value).lower() in ("true", "yes", "on")
        return "train.precision", precision if on else value

    return convert


def _warmup(value: Any) -> tuple[str, Any]:
    is_share = isinstance(value, float) and 0 < value < 1
    return ("optim.warmup_ratio" if is_share else "optim.warmup_steps"), value


def _flag_to_schedule(value: Any) -> tuple[str, Any] | None:
    if value is None or str(value).lower() in ("false", "no", "off"):
        return None
    return "optim.block_schedule", "badam" if str(value).lower() in ("true", "yes", "on") else value


def _flag_to_train_on(all_when: bool) -> Callable[[Any], tuple[str, Any] | None]:
    """A switch of another tool that makes prompts carry loss when it is `all_when`."""

    def convert(value: Any) -> tuple[str, Any] | None:
        if value is None:
            return None
        on = str(value).lower() in ("true", "yes", "on")
        off = str(value).lower() in ("false", "no", "off")
        return "data.train_on", ("all" if on is all_when else "assistant") if on or off else value

    return convert


CONVERTED: dict[str, Callable[[Any], tuple[str, Any] | None]] = {
    "bf16": _flag_to_precision("bf16-mixed"),
    "fp32": _flag_to_precision("fp32"),
    "use_badam": _flag_to_schedule,
    "warmup": _warmup,
    "train_on_prompt": _flag_to_train_on(True),
    "train_on_inputs": _flag_to_train_on(True),
    "mask_prompt": _flag_to_train_on(False),
    "assistant_only_loss": _flag_to_train_on(False),
    "completion_only_loss": _flag_to_train_on(False),
    "train_on_completions": _flag_to_train_on(False),
}
"""name -> function from its value to (dotted field, value), or None where it changes nothing."""

REFUSED: dict[str, str] = {
    "batch_size": "it means rows of a step in some tools and rows at once in others; "
    "write `global_batch_size` or `micro_batch_size`",
    "per_device_eval_batch_size": "validation runs in the micro-batches of training; leave it out",
    "lora": "all parameters are trained; there are no adapters yet",
    "lora_r": "all parameters are trained; there are no adapters yet",
    "lora_rank": "all parameters are trained; there are no adapters yet",
    "lora_alpha": "all parameters are trained; there are no adapters yet",
    "deepspeed": "the plan decides where things lie; `packmule plan` prints it",
    "fsdp": "the plan decides where things lie; `packmule plan` prints it",
    "auto_find_batch_size": "the micro-batch is found before the run; leave it out",
}
"""name -> why there is no such field and what to write."""

EXCLUSIVE: tuple[frozenset[str], ...] = (
    frozenset({"train.max_steps", "train.epochs", "train.max_tokens"}),
    frozenset({"optim.warmup_steps", "optim.warmup_ratio"}),
)
"""Fields of which one decides: setting one on the command line drops the others of the file."""
