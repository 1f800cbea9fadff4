"""The table of what may change on resume: complete, told in the guide, and enforced row by row."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from packmule.errors import ConfigError
from packmule.spec.job import Job
from packmule.spec.resume import COMPUTED_KEYS, TABLE, changes, fields, job_hash, refuse, row_of

GUIDE = Path(__file__).parents[3] / "docs" / "guide.md"

OTHER: dict[str, Any] = {
    "model.path": "other", "model.init": "random", "data.path": "b.txt", "data.format": "text",
    "data.columns": {"text": "body"}, "data.train_on": "all", "data.chat_template": "t.jinja",
    "data.long_documents": "drop", "data.deduplicate": 0.8, "data.val_size": 0.1, "data.val_path": "v.txt",
    "train.output_dir": "x", "train.max_seq_length": 256,
    "train.global_batch_size": 16, "train.micro_batch_size": 2, "train.gradient_accumulation_steps": 8,
    "train.max_steps": 7, "train.epochs": 3.0, "train.max_tokens": 99, "train.precision": "fp64",
    "train.recompute": True, "train.seed": 1, "train.eval_steps": 3, "train.eval_rows": 4,
    "train.best_metric": "perplexity", "train.early_stop_min_delta": 0.5, "train.max_minutes": 3.0,
    "train.sample_prompt": "a", "train.sample_tokens": 3, "train.update": "on-fetch",
    "train.router_aux_loss_coef": 0.1,
    "optim.learning_rate": 1e-3, "optim.lr_scheduler": "linear", "optim.warmup_steps": 3,
    "optim.warmup_ratio": 0.5, "optim.min_lr": 1e-7, "optim.decay_shape": "sqrt", "optim.weight_decay": 0.3,
    "optim.weight_decay_on": "all", "optim.weight_decay_embedding": False, "optim.max_grad_norm": 2.0,
    "optim.adam_beta1": 0.8, "optim.adam_beta2": 0.8, "optim.adam_epsilon": 1e-6,
    "optim.optim": "lomo", "optim.block_schedule": "hift",
    "optim.lr_scaling": "linear", "optim.lr_base_batch_size": 4, "checkpoint.commit_steps": 4,
    "checkpoint.save_steps": 5, "checkpoint.save_total_limit": 3, "checkpoint.save_best": True,
    "checkpoint.resume": "never", "hardware.ram": "1GB", "hardware.disk_path": "d", "hardware.threads": 3,
    "hardware.state": "disk", "hardware.weights": "disk", "hardware.gradients": "disk",
    "hardware.inputs": "disk",
    "hardware.device": "fake", "hardware.device_memory": "1GB",
    "hardware.tbw": "600TB", "logging.logging_steps": 7,
    "logging.report_to": "wandb", "logging.run_name": "r",
}  # fmt: skip
"""Another value of every field that can be changed alone."""

TURNS = {"optim.block_schedule": "badam"}

FACTORIES = {"model.factory": "a:model", "data.factory": "a:samples", "data.path": ()}

TOGETHER: dict[str, dict[str, Any]] = {
    "train.early_stop_patience": {"train.early_stop_patience": 2, "train.eval_steps": 1},
    "optim.decay_steps": {"optim.lr_scheduler": "wsd", "optim.decay_steps": 3},
    "optim.decay_ratio": {"optim.lr_scheduler": "wsd", "optim.decay_ratio": 0.2},
    "optim.batch_warmup_steps": {"optim.batch_warmup_steps": 5, "optim.batch_warmup_rows": 2},
    "optim.batch_warmup_rows": {"optim.batch_warmup_steps": 5, "optim.batch_warmup_rows": 2},
    "optim.block_layers": {**TURNS, "optim.block_layers": 2},
    "optim.block_steps": {**TURNS, "optim.block_steps": 7},
    "optim.block_order": {**TURNS, "optim.block_order": "random"},
    "optim.block_ends": {**TURNS, "optim.block_ends": False},
    "model.factory": FACTORIES,
    "model.arguments": {**FACTORIES, "model.arguments": {"width": 3}},
    "data.factory": {**FACTORIES, "data.factory": "a:others"},
    "data.arguments": {**FACTORIES, "data.arguments": {"count": 3}},
    "data.val_factory": {**FACTORIES, "data.val_size": 0, "data.val_factory": "a:test"},
    "data.val_arguments": {**FACTORIES, "data.val_factory": "a:test", "data.val_arguments": {"count": 3}},
}
"""Fields that need others."""

BEFORE = {
    **dict.fromkeys(
        ("optim.block_layers", "optim.block_steps", "optim.block_order", "optim.block_ends"), TURNS
    ),
    "data.factory": FACTORIES,
    "data.arguments": FACTORIES,
    "data.val_factory": {**FACTORIES, "data.val_size": 0},
    "data.val_arguments": {**FACTORIES, "data.val_factory": "a:test"},
}
"""What a run had that such a change is made to, where not only a model and a text."""

ONLY_VALUE = {"optim.optim"}
"""Fields with one possible value so far."""


def job(values: dict[str, Any]) -> Job:
    sections: dict[str, dict[str, Any]] = {"model": {"path": "m"}, "data": {"path": "a.txt"}}
    for key, value in values.items():
        section, _, name = key.partition(".")
        sections.setdefault(section, {})[name] = value
    return Job.parse(sections, "job.yaml")


CHANGEABLE = [key for key in fields() if key in OTHER or key in TOGETHER]


def test_every_field_is_decided_by_exactly_one_row() -> None:
    for key in (*fields(), *COMPUTED_KEYS):
        assert sum(key in row.keys for row in TABLE) <= 1, key
        row_of(key)
    named = {key for row in TABLE for key in row.keys if not key.endswith("*")}
    assert named <= {*fields(), *COMPUTED_KEYS}
    assert {*CHANGEABLE, *ONLY_VALUE} == set(fields())


def test_every_row_is_reached_by_a_change_below() -> None:
    reached = {row_of(key).what for key in (*CHANGEABLE, *COMPUTED_KEYS)}
    assert {row.what for row in TABLE} - reached <= {row_of(key).what for key in ONLY_VALUE}


@pytest.mark.parametrize("key", CHANGEABLE)
def test_a_change_has_the_effect_of_its_row(key: str) -> None:
    before, after = job(BEFORE.get(key, {})), job(TOGETHER.get(key, {key: OTHER.get(key)}))
    effect = row_of(key).effect
    found = {change.key: change for change in changes(before, after, (effect,))}
    assert key in found
    assert str(found[key]).startswith(f"`{key}` was ")
    if effect == "refused":
        assert job_hash(before) != job_hash(after)
        with pytest.raises(ConfigError) as caught:
            refuse(before, after, "out")
        assert f"`{key}` was " in caught.value.cause
        assert "--model out --output-dir" in caught.value.hint
    else:
        assert key not in {change.key for change in changes(before, after, ("refused",))}
        if key != "data.val_path":  # which frees the text that val_size holds out
            assert job_hash(before) == job_hash(after)
            refuse(before, after, "out")
    assert not changes(after, after, ("keeps", "said", "renumber", "refused"))


def test_a_moved_model_is_the_same_model() -> None:
    assert job_hash(job({"model.path": "/a/m"})) == job_hash(job({"model.path": "../b/m"}))


def test_evaluating_on_other_text_frees_what_was_held_out() -> None:
    """Held-out text becomes training text: other rows, which a resume refuses."""
    with pytest.raises(ConfigError, match=r"`data\.val_size` was 0\.02, is 0"):
        refuse(job({}), job({"data.val_path": "v.txt"}), "out")
    refuse(job({"data.val_size": 0}), job({"data.val_size": 0, "data.val_path": "v.txt"}), "out")
    with pytest.raises(ConfigError, match=r"`data\.val_size` was 0\.02, is 0"):
        refuse(job(FACTORIES), job({**FACTORIES, "data.val_factory": "a:test"}), "out")


def test_the_guide_prints_the_table() -> None:
    text = GUIDE.read_text().split("### What may change")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (.+?) \| (.+?) \| (.+?) \|$", text, re.MULTILINE)
    told = {
        "keeps": "keeps every bit",
        "said": "said aloud",
        "renumber": "needs `--renumber`",
        "refused": "refused",
    }
    printed = [(what, effect, then) for what, effect, then in rows if effect in told.values()]
    assert printed == [(row.what, told[row.effect], row.then.replace("{run}", "RUN")) for row in TABLE]
