"""Files, variables and flags become one job; names of other tools are understood or refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from packmule.errors import ConfigError
from packmule.spec.job import SECTIONS, load_job, read_job
from packmule.spec.job_names import ALIASES, CONVERTED, FIXED, REFUSED

MODEL = "model: {path: m}\n"


def changed(text: str, **layers: Any) -> dict[str, Any]:
    """Fields that differ from the defaults, by dotted key."""
    default, found = load_job(MODEL, "d").model_dump(), load_job(text, "job.yaml", **layers).model_dump()
    return {f"{s}.{k}": v for s in found for k, v in found[s].items() if v != default[s][k]}


def refusal(text: str, **layers: Any) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load_job(text, "job.yaml", **layers)
    assert caught.value.exit_code == 2
    return caught.value


def test_flat_names_of_other_tools_are_read_and_reported() -> None:
    text = """
    model_name_or_path: m
    dataset: [a.txt, b.txt]
    output-dir: out
    cutoff_len: 128
    per_device_train_batch_size: 2
    gradient_accumulation_steps: 4
    num_train_epochs: 3
    max_steps: -1
    learning_rate: 1e-4
    lr_scheduler_type: constant_with_warmup
    warmup: 0.1
    optim: adamw_torch
    max_grad_norm: None
    gradient_checkpointing: true
    bf16: true
    resume_from_checkpoint: true
    report_to: none
    """
    assert changed(text) == {
        "data.path": ("a.txt", "b.txt"),
        "train.output_dir": "out",
        "train.max_seq_length": 128,
        "train.micro_batch_size": 2,
        "train.gradient_accumulation_steps": 4,
        "train.epochs": 3.0,
        "train.precision": "bf16-mixed",
        "train.recompute": True,
        "optim.learning_rate": 1e-4,
        "optim.lr_scheduler": "constant",
        "optim.warmup_ratio": 0.1,
        "optim.max_grad_norm": None,
    }
    notes = read_job(text, "job.yaml").notes
    assert "job.yaml: `cutoff_len` was read as `train.max_seq_length`" in notes
    assert "job.yaml: `output-dir` was read as `train.output_dir`" in notes


def test_sections_need_no_notes() -> None:
    assert read_job("model: {path: m}\ntrain: {max-steps: 3}\noptim: {learning_rate: 1e-4}", "j").notes == ()


def test_layers_win_in_order_file_variable_flag() -> None:
    text = MODEL + "optim: {learning_rate: 1e-3, weight_decay: 0.3, adam_beta1: 0.5}"
    variables = [("PACKMULE_LR", "1e-4"), ("PACKMULE_OPTIM__WEIGHT_DECAY", "0.2")]
    found = load_job(text, "job.yaml", overrides=[("learning-rate", "1e-5")], variables=variables).optim
    assert (found.learning_rate, found.weight_decay, found.adam_beta1) == (1e-5, 0.2, 0.5)


@pytest.mark.parametrize(
    "key", ["max-steps", "max_steps", "train.max-steps", "Train.Max_Steps", "training.max_steps"]
)
def test_hyphen_underscore_and_case_are_alike(key: str) -> None:
    assert changed(MODEL, overrides=[(key, "5")])["train.max_steps"] == 5
    section, _, name = key.rpartition(".")
    text = f"{section}: {{{name}: 5}}" if section else f"{name}: 5"
    assert changed(MODEL + text)["train.max_steps"] == 5


@pytest.mark.parametrize("word", ["none", "None", "null", "~"])
def test_null_has_its_usual_spellings_in_files_and_flags(word: str) -> None:
    assert load_job(MODEL + f"optim: {{max_grad_norm: {word}}}", "j").optim.max_grad_norm is None
    assert load_job(MODEL, "j", overrides=[("max-grad-norm", word)]).optim.max_grad_norm is None
    text = MODEL + "logging: {run_name: r}"
    assert load_job(text, "j", overrides=[("run-name", word)]).logging.run_name is None


@pytest.mark.parametrize("number", ["1e-4", "1E-4", "0.0001", "'1e-4'", ".0001"])
def test_numbers_have_their_usual_spellings(number: str) -> None:
    assert load_job(MODEL + f"optim: {{lr: {number}}}", "j").optim.learning_rate == 1e-4
    assert load_job(MODEL, "j", overrides=[("optim.lr", number.strip("'"))]).optim.learning_rate == 1e-4


def test_a_flag_for_text_is_taken_as_it_stands() -> None:
    found = load_job(
        MODEL, "j", overrides=[("run-name", "1e-4"), ("sample_prompt", "true"), ("dataset", "2024")]
    )
    assert (found.logging.run_name, found.train.sample_prompt, found.data.path) == ("1e-4", "true", ("2024",))


def test_several_data_sets_are_one_list() -> None:
    assert load_job(MODEL, "j", overrides=[("dataset", "['a b', c]")]).data.path == ("a b", "c")


UNKNOWN = (
    ("train: {max_stesp: 3}", "`train.max_stesp`", "`train.max_steps`"),
    ("max_stesp: 3", "`max_stesp`", "`train.max_steps`, section `train`"),
    ("train: {learning_rate: 1}", "`train.learning_rate`", "section `optim`: write `optim.learning_rate`"),
    ("train: {lr: 1}", "`train.lr`", "section `optim`: write `optim.learning_rate`"),
    ("trian: {max_steps: 3}", "`trian`", "section `train`"),
    ("trian.max_steps: 3", "`trian.max_steps`", "write `train.max_steps`"),
    ("path: a", "`path`", "`model.path` or `data.path`"),
    ("zzzz: a", "`zzzz`", "sections: model, data, train"),
    ("optim: {zzzz: a}", "`optim.zzzz`", "keys of `optim`: optim, learning_rate"),
    ("train: 3", "`train` = 3 is a section", "output_dir"),
    ("batch_size: 4", "no `batch_size`", "`global_batch_size` or `micro_batch_size`"),
    ("lora_r: 8", "no `lora_r`", "adapters"),
    ("fp16: true", "`fp16` = True is not offered", "leave `fp16` out"),
    ("packing: false", "`packing` = False is not offered", "leave `packing` out"),
)


@pytest.mark.parametrize(("text", "named", "hint"), UNKNOWN)
def test_an_unknown_key_is_answered_with_the_nearest_and_its_section(
    text: str, named: str, hint: str
) -> None:
    error = refusal(MODEL + text)
    assert error.cause.startswith("job.yaml: ")
    assert named in error.cause
    assert hint in error.hint


@pytest.mark.parametrize(
    ("layers", "source"),
    [
        ({"overrides": [("lr", "abc")]}, "the command line (--lr): `optim.learning_rate` = 'abc'"),
        (
            {"overrides": [("optim.lerning-rate", "1")]},
            "the command line (--optim.lerning-rate): unknown key",
        ),
        ({"variables": [("PACKMULE_RAM", "much")]}, "PACKMULE_RAM: `hardware.ram` = 'much'"),
        ({"variables": [("PACKMULE_RAMM", "1GB")]}, "PACKMULE_RAMM: unknown key"),
    ],
)
def test_the_layer_that_is_wrong_is_named(layers: dict[str, Any], source: str) -> None:
    assert refusal(MODEL, **layers).cause.startswith(source)


def test_an_empty_job_says_what_is_missing() -> None:
    for text in ("", "model:", "train: {max_steps: 3}", "# nothing"):
        assert "`model.path` is missing" in refusal(text).cause
    assert "no `key: value` lines" in refusal("- a\n- b").cause


def test_a_flag_replaces_the_other_ways_to_say_how_long() -> None:
    text = MODEL + "train: {epochs: 3}\noptim: {warmup_steps: 5}"
    found = load_job(text, "j", overrides=[("max-steps", "10"), ("warmup-ratio", "0.1")])
    assert (found.train.max_steps, found.train.epochs) == (10, None)
    assert (found.optim.warmup_steps, found.optim.warmup_ratio) == (None, 0.1)
    refusal(text, overrides=[("max-steps", "10"), ("max-tokens", "99")])


IMPLIED = "train: {micro_batch_size: 4, gradient_accumulation_steps: 2}"
WRITTEN = "train: {micro_batch_size: 4, gradient_accumulation_steps: 2, global_batch_size: 8}"


@pytest.mark.parametrize(
    ("text", "flags", "expected"),
    [
        (IMPLIED, {"micro-batch-size": "1"}, (8, 1)),
        (WRITTEN, {"micro-batch-size": "1"}, (8, 1)),
        (IMPLIED, {"micro-batch-size": "auto"}, (8, "auto")),
        (IMPLIED, {"global-batch-size": "16"}, (16, 4)),
        (IMPLIED, {"gradient-accumulation-steps": "4"}, (16, 4)),
        (WRITTEN, {"gradient-accumulation-steps": "4"}, (8, 2)),
        (WRITTEN, {"gradient-accumulation-steps": "2", "global-batch-size": "16"}, (16, 8)),
        ("per_device_train_batch_size: 2", {}, (2, 2)),
        ("per_device_train_batch_size: 2", {"micro-batch-size": "1"}, (2, 1)),
        ("per_device_train_batch_size: 2", {"global-batch-size": "6"}, (6, 2)),
    ],
)
def test_rows_of_a_step_stay_when_a_flag_changes_how_they_are_cut(
    text: str, flags: dict[str, str], expected: tuple[int, object]
) -> None:
    train = load_job(MODEL + text, "j", overrides=list(flags.items())).train
    assert (train.global_batch_size, train.micro_batch_size) == expected


def test_tables_of_names_point_at_fields_and_shadow_none() -> None:
    fields = {f"{section}.{key}" for section, kind in SECTIONS.items() for key in kind.model_fields}
    assert set(ALIASES.values()) <= fields
    names = {field.partition(".")[2] for field in fields}
    for table in (ALIASES, CONVERTED, FIXED, REFUSED):
        assert not table.keys() & (names - {"optim"})
    tables = [*ALIASES, *CONVERTED, *FIXED, *REFUSED]
    assert len(tables) == len(set(tables))


@pytest.mark.parametrize("alias", sorted(ALIASES))
def test_every_alias_works_alone_and_in_its_section(alias: str) -> None:
    section, _, key = ALIASES[alias].partition(".")
    # A mapping is refused by every field, so the error shows which field the alias reached.
    for dotted in (alias, f"{section}.{alias}"):
        error = refusal(MODEL, overrides=[(dotted, "[[x]]")])
        assert f"`{section}.{key}" in error.cause


def test_a_flag_can_hold_a_mapping_where_a_field_is_one() -> None:
    flags = [("model.arguments", "{width: 8, heads: [1, 2]}"), ("sample-prompt", "{a: 1}")]
    with pytest.raises(ConfigError, match=r"`model\.arguments` are given without"):
        load_job("model: m", "a", overrides=flags)
    text = "model: {factory: a:b}\ndata: {factory: a:c}"
    found = load_job(text, "a", overrides=flags[:1])
    assert found.model.arguments == {"width": 8, "heads": [1, 2]}
    assert load_job("model: m", "a", overrides=flags[1:]).train.sample_prompt == "{a: 1}"
    found = load_job("model: m", "a", overrides=[("data.columns", "{text: body}")])
    assert found.data.columns == {"text": "body"}
