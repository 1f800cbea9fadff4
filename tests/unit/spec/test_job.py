"""A job is checked at construction, and every refusal names field, value and fix."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from packmule.errors import ConfigError
from packmule.spec.job import SECTIONS, Job, load_job


def job(**sections: dict[str, Any]) -> Job:
    return Job.parse({"model": {"path": "m"}, **sections}, "job.yaml")


BAD_FIELDS = (
    ("model", "path", "", "is empty"),
    ("model", "init", "zeros", "'pretrained' or 'random'"),
    ("model", "factory", "vit", "module:function"),
    ("model", "factory", "vit.py:model()", "module:function"),
    ("data", "factory", 3, "module:function"),
    ("data", "val_size", -0.1, "share"),
    ("data", "val_size", 2.5, "whole number"),
    ("data", "val_size", True, "share"),
    ("data", "path", [""], "is empty"),
    ("train", "max_seq_length", 1, "greater than or equal to 2"),
    ("train", "global_batch_size", 0, "greater than or equal to 1"),
    ("train", "micro_batch_size", "small", "`auto` or a whole number"),
    ("train", "micro_batch_size", 2.5, "`auto` or a whole number"),
    ("train", "micro_batch_size", 0, "`auto` or a whole number"),
    ("train", "max_steps", True, "not a number"),
    ("train", "max_steps", 0, "greater than or equal to 1"),
    ("train", "epochs", 0, "greater than 0"),
    ("train", "epochs", float("inf"), "finite"),
    ("train", "precision", "fp16", "bf16-mixed"),
    ("train", "precision", "bf16-true", "bf16-mixed"),
    ("train", "precision", "fp7", "'bf16-mixed'"),
    ("train", "recompute", "sometimes", "`auto`, `true` or `false`"),
    ("train", "update", "later", "'on-backward'"),
    ("train", "seed", -1, "greater than or equal to 0"),
    ("optim", "optim", "sgd", "'adamw'"),
    ("optim", "learning_rate", "nan", "finite"),
    ("optim", "learning_rate", -1, "greater than or equal to 0"),
    ("optim", "lr_scheduler", "step", "'cosine'"),
    ("optim", "warmup_ratio", 1.5, "less than or equal to 1"),
    ("optim", "adam_beta2", 1.0, "less than 1"),
    ("optim", "adam_epsilon", 0, "greater than 0"),
    ("optim", "max_grad_norm", "big", "number"),
    ("checkpoint", "commit_steps", 0, "`auto` or a whole number"),
    ("checkpoint", "save_total_limit", 0, "greater than or equal to 1"),
    ("hardware", "ram", "2 XB", "GiB"),
    ("hardware", "ram", 0, "2.2GB"),
    ("hardware", "threads", "all", "`auto` or a whole number"),
    ("hardware", "state", "gpu", "'disk'"),
    ("logging", "report_to", "mlflow", "tensorboard, wandb, trackio"),
    ("optim", "decay_ratio", 1.5, "less than or equal to 1"),
    ("optim", "lr_scaling", "cubic", "'sqrt'"),
    ("optim", "weight_decay_on", "layers", "'all'"),
    ("train", "early_stop_patience", 0, "greater than or equal to 1"),
    ("train", "max_minutes", 0, "greater than 0"),
    ("logging", "logging_steps", 0, "greater than or equal to 1"),
)


@pytest.mark.parametrize(("section", "key", "value", "fix"), BAD_FIELDS)
def test_a_bad_value_names_source_field_value_and_fix(
    section: str, key: str, value: object, fix: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        job(**{section: {"path": "m", key: value} if section == "model" else {key: value}})
    message = str(caught.value)
    assert f"job.yaml: `{section}.{key}" in message
    assert fix in message
    assert "literal[" not in message
    assert "hint: change" in message or "hint: did you mean" in message
    assert "Input should" not in message


@pytest.mark.parametrize(("key", "value", "cause", "hint"), [
    ("train.max_steps", "ten", "= 'ten' is not a whole number", "change `train.max_steps` in job.yaml"),
    ("train.max_steps", 1.5, "= 1.5 is not a whole number", "change `train.max_steps` in job.yaml"),
    ("optim.learning_rate", "1e-4x", "= '1e-4x' is not a number", "change `optim.learning_rate` in job.yaml"),
    ("optim.learning_rate", None, "= None is not a number",
     "leave `optim.learning_rate` out, or give it a value"),
    ("optim.adam_epsilon", 0, "= 0 is not greater than 0", "change `optim.adam_epsilon` in job.yaml"),
    ("optim.lr_scheduler", "cosin", "= 'cosin' is not one of 'constant', 'linear', 'cosine' or 'wsd'",
     "did you mean `cosine`?"),
    ("checkpoint.save_best", "x", "= 'x' is neither true nor false",
     "change `checkpoint.save_best` in job.yaml"),
    ("data.columns", "x", "= 'x' is not a mapping", "change `data.columns` in job.yaml"),
    ("train.output_dir", "", "= '' is empty", "change `train.output_dir` in job.yaml"),
    ("train.output_dir", [], "= [] is not text", "change `train.output_dir` in job.yaml"),
])  # fmt: skip
def test_what_is_wrong_with_a_value_is_said_in_these_words(
    key: str, value: object, cause: str, hint: str
) -> None:
    section, _, name = key.partition(".")
    with pytest.raises(ConfigError) as caught:
        job(**{section: {name: value}})
    assert str(caught.value) == f"job.yaml: `{key}` {cause}.\nhint: {hint}"


def test_every_field_refuses_a_nested_mapping() -> None:
    nested = {"a": {"b": 1}}
    for section, kind in SECTIONS.items():
        for key in kind.model_fields:
            with pytest.raises(ConfigError, match=rf"`{section}\.{key}"):
                job(**{section: {"path": "m", key: nested} if section == "model" else {key: nested}})


def test_a_job_cannot_be_changed() -> None:
    with pytest.raises(ValidationError):
        job().train.seed = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, (8, "auto", None)),
        ({"micro_batch_size": 4}, (8, 4, None)),
        ({"micro_batch_size": 2, "gradient_accumulation_steps": 8}, (16, 2, 8)),
        ({"global_batch_size": 8, "gradient_accumulation_steps": 4}, (8, 2, 4)),
        ({"global_batch_size": 8, "gradient_accumulation_steps": 3}, (8, 3, 3)),
        ({"global_batch_size": 8, "micro_batch_size": 3}, (8, 3, None)),
        ({"gradient_accumulation_steps": 2}, (8, 4, 2)),
    ],
)
def test_the_third_batch_size_follows_from_two(given: dict[str, int], expected: tuple[object, ...]) -> None:
    train = job(train=given).train
    assert (train.global_batch_size, train.micro_batch_size, train.gradient_accumulation_steps) == expected


@pytest.mark.parametrize(
    ("sections", "named"),
    [
        (
            {"train": {"global_batch_size": 8, "micro_batch_size": 4, "gradient_accumulation_steps": 4}},
            "takes 2",
        ),
        ({"train": {"global_batch_size": 8, "gradient_accumulation_steps": 5}}, "takes 4"),
        ({"train": {"global_batch_size": 2, "micro_batch_size": 4}}, "more than"),
        ({"train": {"max_steps": 3, "epochs": 1}}, "`train.max_steps` = 3 and `train.epochs` = 1.0"),
        ({"train": {"max_tokens": 3, "epochs": 1}}, "`train.max_tokens` = 3"),
        ({"optim": {"warmup_steps": 3, "warmup_ratio": 0.1}}, "warm up"),
        ({"optim": {"min_lr": 1.0}}, "`optim.min_lr` = 1.0 is above"),
        ({"optim": {"lr_scheduler": "wsd", "decay_steps": 3, "decay_ratio": 0.1}}, "last phase"),
        ({"optim": {"decay_steps": 3}}, "'cosine' has no last phase"),
        ({"optim": {"batch_warmup_steps": 3}}, "belong together"),
        ({"optim": {"batch_warmup_steps": 3, "batch_warmup_rows": 8}}, "nothing to grow to"),
        ({"optim": {"batch_warmup_steps": 2, "batch_warmup_rows": 1}}, "doubles 3 times"),
        ({"train": {"early_stop_patience": 2}}, "`train.eval_steps`"),
    ],
)
def test_fields_that_contradict_each_other_are_refused(sections: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        job(**sections)
    assert named in caught.value.cause
    assert caught.value.hint


def test_without_a_length_one_epoch_is_trained() -> None:
    assert job().train.epochs == 1
    assert job(train={"max_steps": 7}).train.epochs is None
    assert job(train={"max_steps": -1, "epochs": 0.25}).train.epochs == 0.25


@pytest.mark.parametrize(
    ("features", "expected"),
    [
        ((), "fp32"),
        (("avx2", "avx512f"), "fp32"),
        (("avx512_bf16",), "bf16-mixed"),
        (("amx_bf16",), "bf16-mixed"),
        (("asimd", "bf16"), "bf16-mixed"),
        (("asimd", "sve"), "fp32"),
    ],
)
def test_auto_precision_is_bf16_where_the_cpu_multiplies_it(features: tuple[str, ...], expected: str) -> None:
    assert job().train.resolved_precision(features) == expected
    assert job(train={"precision": "float32"}).train.resolved_precision(features) == "fp32"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("bf16", "bf16-mixed"),
        ("bf16_mixed", "bf16-mixed"),
        ("float64", "fp64"),
        (32, "fp32"),
        ("AUTO", "auto"),
    ],
)
def test_precisions_have_the_names_of_other_tools(name: object, expected: str) -> None:
    assert job(train={"precision": name}).train.precision == expected


@pytest.mark.parametrize("value", [None, 0, -1, 0.0, "0"])
def test_clipping_is_off_at_null_or_zero(value: object) -> None:
    assert job(optim={"max_grad_norm": value}).optim.max_grad_norm is None


def test_a_warmup_ratio_is_rounded_up_like_in_transformers() -> None:
    assert job(optim={"warmup_ratio": 0.03}).optim.warmup(101) == 4
    assert job(optim={"warmup_steps": 7}).optim.warmup(101) == 7
    assert job().optim.warmup(101) == 0


OWN: dict[str, dict[str, Any]] = {
    "model": {"factory": "examples/vit.py:model", "arguments": {"width": 8}},
    "data": {"factory": "package.vit:Digits.all"},
}


def test_modules_of_ones_own_need_no_path() -> None:
    found = Job.parse(OWN, "job.yaml")
    found.require_data()
    assert (found.model.path, found.data.path) == (None, ())
    assert load_job(found.to_yaml(), "config.yaml") == found


@pytest.mark.parametrize(
    ("section", "key", "value", "said"),
    [
        ("data", "factory", None, "`data.factory` is missing"),
        ("model", "factory", None, "`model.path` is null"),
        ("data", "path", ["a.txt"], "samples come from `data.factory`"),
        ("data", "val_path", ["a.txt"], "samples to evaluate on come from `data.val_factory`"),
        ("data", "val_factory", "vit", "name a function: `module:function`"),
        ("model", "init", "random", "the factory draws or reads the weights"),
        ("train", "max_seq_length", 64, "a row is one sample"),
        ("train", "max_tokens", 64, "use max_steps or epochs"),
        ("train", "sample_prompt", "a", "continue no text"),
        ("train", "recompute", False, "nothing of a forward is kept"),
    ],
)
def test_what_modules_of_ones_own_cannot_have_is_refused(
    section: str, key: str, value: Any, said: str
) -> None:
    sections = {**OWN, section: {**OWN.get(section, {}), key: value}}
    if (section, key) == ("model", "factory"):
        sections["model"] = {"path": None}
    with pytest.raises(ConfigError) as caught:
        Job.parse(sections, "job.yaml")
    assert said in str(caught.value)


def test_arguments_need_their_function() -> None:
    with pytest.raises(ConfigError, match=r"`model\.arguments` are given without"):
        job(model={"path": "m", "arguments": {"width": 3}})
    with pytest.raises(ConfigError, match=r"`data\.arguments` are given without"):
        job(data={"arguments": {"count": 3}})
    with pytest.raises(ConfigError, match=r"`data\.val_arguments` are given without `data\.val_factory`"):
        job(data={"val_arguments": {"count": 3}})
    for own in ({"factory": "a:b"}, {"path": "a.txt", "val_factory": "a:b"}):
        with pytest.raises(ConfigError, match=r"there is no `model\.factory`"):
            job(data=own)


def test_data_of_its_own_to_evaluate_on_leaves_all_other_data_to_train_on() -> None:
    assert job(data={"path": "a.txt"}).data.held_out == 0.02
    assert job(data={"path": "a.txt", "val_path": "b.txt", "val_size": 9}).data.held_out == 0
    own = {**OWN, "data": {**OWN["data"], "val_size": 9}}
    assert Job.parse(own, "job.yaml").data.held_out == 9
    own["data"] = {**own["data"], "val_factory": "a:test", "val_arguments": {"count": 3}}
    assert Job.parse(own, "job.yaml").data.held_out == 0


def test_planning_needs_no_data_but_training_does() -> None:
    with pytest.raises(ConfigError, match="`data\\.path` is missing"):
        job().require_data()
    job(data={"path": "a.txt"}).require_data()
    assert job(data={"path": "a.txt"}).data.path == ("a.txt",)


def test_the_resolved_job_reads_back_equal() -> None:
    first = job(
        data={"path": ["a", "b: c"], "val_size": 12},
        train={
            "micro_batch_size": 2,
            "gradient_accumulation_steps": 3,
            "sample_prompt": "none",
            "recompute": False,
        },
        optim={"learning_rate": 1e-4, "max_grad_norm": None, "warmup_ratio": 0.1},
        hardware={"ram": "2.2GB"},
        logging={"run_name": "1e-4"},
    )
    assert load_job(first.to_yaml(), "config.yaml") == first
    assert Job.parse_json(first.to_json(), "job.json") == first


def test_the_last_phase_of_wsd_is_a_tenth_unless_told() -> None:
    assert job(optim={"lr_scheduler": "wsd"}).optim.decay(101) == 11
    assert job(optim={"lr_scheduler": "warmup_stable_decay", "decay_ratio": 0.5}).optim.decay(101) == 51
    assert job(optim={"lr_scheduler": "wsd", "decay_steps": 7}).optim.decay(101) == 7
    assert job().optim.decay(101) == 0


@pytest.mark.parametrize("name", ["loss", "eval_loss", "eval/loss", " eval_loss "])
def test_metrics_have_the_names_of_other_tools(name: str) -> None:
    assert job(train={"best_metric": name}).train.best_metric == "eval/loss"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("none", ()),
        (None, ()),
        ("jsonl", ()),
        ("wandb", ("wandb",)),
        ("tensorboard, wandb", ("tensorboard", "wandb")),
        (["trackio", "jsonl", "trackio"], ("trackio",)),
    ],
)
def test_sinks_are_a_list_and_jsonl_goes_without_saying(given: object, expected: tuple[str, ...]) -> None:
    assert job(logging={"report_to": given}).logging.report_to == expected
