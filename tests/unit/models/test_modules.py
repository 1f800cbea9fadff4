"""What a user's functions may give, and what is said of what they may not."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from packmule.errors import ConfigError
from packmule.models.modules.bodies import ModuleBodies
from packmule.models.modules.build import build, load
from packmule.models.modules.samples import Draw, SampleBatch, Samples, open_dataset, split
from packmule.shapes.bodies import DTYPES


@pytest.fixture
def user(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], str]:
    """Offers a function under a name: `user(function)` is "user_code:made"."""

    def offer(function: Any) -> str:
        module = ModuleType("user_code")
        module.made = function  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "user_code", module)
        return "user_code:made"

    return offer


class Head(nn.Module):
    """What `give` makes of x and the batch."""

    def __init__(self, give: Callable[[Tensor, Any], Any] = lambda x, batch: x.sum(1)) -> None:
        super().__init__()
        self.gain, self.give = nn.Parameter(torch.ones(())), give

    def forward(self, x: Tensor, batch: Any) -> Any:
        return self.give(x * self.gain, batch)


def parts(**changes: Any) -> SimpleNamespace:
    """A model that can be used, but for the changes."""
    given = {"embed": nn.Linear(3, 4), "blocks": [nn.Linear(4, 4), nn.Linear(4, 4)], "head": Head()}
    return SimpleNamespace(**{**given, **changes})


def refusal(user: Callable[[Any], str], **changes: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        build(user(lambda: parts(**changes)), {}, 0, "float32")
    return str(caught.value)


def test_what_is_left_of_a_model_has_no_parameters(user: Callable[[Any], str]) -> None:
    seen = []
    made = build(
        user(parts),
        {},
        0,
        "float32",
        lambda i, p: seen.append((i, p.name, p.module.training, len(p.parameters))),
    )
    assert [(i, name, count) for i, name, _, count in seen] == [
        (0, "embed", 2), (1, "blocks.0", 2), (2, "blocks.1", 2), (3, "head", 1),
    ]  # fmt: skip
    for part in made.parts:
        assert all(p.is_meta for p in part.module.parameters())


def test_roles_follow_what_a_parameter_is(user: Callable[[Any], str]) -> None:
    made = build(user(lambda: parts(embed=nn.Embedding(5, 4))), {}, 0, "float32")
    assert made.parts[0].parameters[0].role == "embedding"
    assert {p.name: p.role for p in made.parts[1].parameters} == {"weight": "matrix", "bias": "norm"}


@pytest.mark.parametrize("lazy", [False, True])
def test_tied_parameters_are_named(user: Callable[[Any], str], lazy: bool) -> None:
    shared = nn.Linear(4, 4)
    other = nn.Sequential(shared)
    blocks = [(lambda: shared), (lambda: other)] if lazy else [shared, other]
    message = refusal(user, blocks=blocks)
    assert "`blocks.0.weight` and `blocks.1.0.weight` are one parameter (tied)" in message
    assert "untie them" in message


def test_running_statistics_are_refused_with_the_reason(user: Callable[[Any], str]) -> None:
    message = refusal(user, blocks=[nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))])
    assert "`blocks.0.1` is a BatchNorm1d, which changes its running statistics in every forward" in message
    assert "use LayerNorm or GroupNorm" in message


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"blocks": [nn.Linear(4, 4), nn.GELU()]}, "`blocks.1` has no parameters."),
        ({"blocks": []}, "is empty."),
        ({"blocks": 3}, "is no sequence."),
        ({"embed": "x"}, "`embed` of `user_code:made` is a str."),
        ({"embed": lambda: 3}, "`embed` made a int, not a torch.nn.Module."),
        ({"embed": lambda: 1 / 0}, "`embed` failed with ZeroDivisionError: division by zero"),
    ],
)
def test_what_is_no_model_is_refused(user: Callable[[Any], str], changes: dict[str, Any], said: str) -> None:
    assert said in refusal(user, **changes)


def test_frozen_and_whole_number_parameters_are_refused(user: Callable[[Any], str]) -> None:
    frozen, counted = nn.Linear(4, 4), nn.Linear(4, 4)
    frozen.bias.requires_grad_(False)
    counted.bias = nn.Parameter(torch.ones(4, dtype=torch.int64), requires_grad=False)
    assert "`blocks.0.bias` does not require a gradient" in refusal(user, blocks=[frozen])
    assert "`blocks.0.bias` is torch.int64" in refusal(user, blocks=[counted])


def test_a_model_without_a_part_is_refused(user: Callable[[Any], str]) -> None:
    with pytest.raises(ConfigError, match="without `blocks`, `head`"):
        build(user(lambda: SimpleNamespace(embed=nn.Linear(1, 1))), {}, 0, "float32")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("nosuch_module:f", "there is no module `nosuch_module` to import"),
        ("math:sqr", "did you mean `math:sqrt`?"),
        ("math:pi", "is a float, not a function"),
    ],
)
def test_a_name_that_means_nothing_is_refused(name: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(name, "the model")
    assert said in str(caught.value)


def test_a_file_is_imported_as_a_script_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "beside_user_code.py").write_text("WIDTH = 3\n")
    (tmp_path / "lone_user_code.py").write_text(
        "from beside_user_code import WIDTH\nclass Kept:\n    width = staticmethod(lambda: WIDTH)\n"
    )
    path = f"{tmp_path}/lone_user_code.py"
    assert load(f"{path}:Kept.width", "the model")() == 3
    assert load(f"{path}:Kept", "the model") is load(f"{path}:Kept", "the model")
    (tmp_path / "json.py").write_text("def dumps():\n    return 'mine'\n")
    assert load(f"{tmp_path}/json.py:dumps", "the model")() == "mine"
    assert sys.modules["json"].__file__ != f"{tmp_path}/json.py"
    with pytest.raises(ConfigError, match=r"there is no such file"):
        load(f"{tmp_path}/none.py:f", "the model")


def test_an_error_in_the_users_file_names_its_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_user_code.py").write_text(
        "import torch\n\ndef made():\n    raise KeyError('width')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError) as caught:
        build("broken_user_code:made", {}, 0, "float32")
    assert f"failed with KeyError: 'width' ({tmp_path}/broken_user_code.py, line 4)" in str(caught.value)
    (tmp_path / "unimportable_code.py").write_text("import nosuch_dependency\n")
    with pytest.raises(ConfigError, match="importing `unimportable_code` failed with ModuleNotFoundError"):
        load("unimportable_code:made", "the model")


def bodies(user: Callable[[Any], str], precision: str = "fp32", **changes: Any) -> ModuleBodies:
    types = DTYPES[precision]
    return ModuleBodies(build(user(lambda: parts(**changes)), {}, 0, types.compute), types, 0)


def weights_of(made: ModuleBodies, block: int) -> dict[str, Tensor]:
    return {p.name: torch.ones(p.shape) for p in made.model.parts[block].parameters}


@pytest.mark.parametrize(
    ("give", "said"),
    [
        (lambda x, batch: x.sum(), "one loss per target"),
        (lambda x, batch: 1.0, "`head` gave float"),
        (lambda x, batch: x.argmax(1), "one loss per target"),
        (lambda x, batch: x[:, 0][1:], "`head` gave 2 losses for 3 targets"),
        (lambda x, batch: (x[:, 0], 3), "`head` gave a int beside its losses"),
        (lambda x, batch: (x[:, 0], {"f1": x[:2, 0]}), "`head` gave 2 values as 'f1' for 3 targets"),
        (lambda x, batch: (x[:, 0], {"f1": 0.5}), "`head` gave a float as 'f1' for 3 targets"),
        (lambda x, batch: (x[:, 0], {"loss": x[:, 0]}), "reports 'loss', which cannot name a metric"),
        (lambda x, batch: (x[:, 0], {"top 5": x[:, 0]}), "reports 'top 5', which cannot name a metric"),
    ],
)
def test_a_head_gives_one_loss_per_target(
    user: Callable[[Any], str], give: Callable[[Tensor, Any], Any], said: str
) -> None:
    made = bodies(user, head=Head(give))
    batch = SampleBatch(torch.ones(3, 3), 3, 3)
    with pytest.raises(ConfigError) as caught:
        made.evaluate(weights_of(made, 3), torch.ones(3, 4), batch)
    assert said in str(caught.value)


def test_a_block_keeps_rows_and_dtype(user: Callable[[Any], str]) -> None:
    class Wrong(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return self.change(super().forward(x))

    batch = SampleBatch(torch.ones(3, 3), 3, 3)
    for change, said in (
        (lambda x: x[:2], "gave (2, 4) for a batch of 3"),
        (lambda x: (x, x), "gave tuple for a batch of 3"),
        (lambda x: x.double(), "gave torch.float64; this run computes in float32"),
    ):
        block = Wrong(4, 4)
        block.change = change
        made = bodies(user, blocks=[block])
        with pytest.raises(ConfigError) as caught:
            made.forward(1, weights_of(made, 1), torch.ones(3, 4), batch, Draw(1, 0))
        assert said in str(caught.value)


def test_inputs_come_in_the_compute_dtype_and_labels_as_they_are(user: Callable[[Any], str]) -> None:
    batch = SampleBatch({"x": torch.ones(2, 3), "y": torch.tensor([1, 2]), "name": ["a", "b"]}, 2, 2)
    made = bodies(user, "bf16-mixed").batch(batch)
    assert (made.data["x"].dtype, made.data["y"].dtype, made.data["name"]) == (
        torch.bfloat16, torch.int64, ["a", "b"],
    )  # fmt: skip


# Data sets


def test_every_sample_comes_once_an_epoch_wherever_one_begins(seed: int) -> None:
    chosen, held_out = split(50, 7, seed)
    assert sorted([*chosen, *held_out]) == list(range(50)) and len(held_out) == 7
    samples = Samples([(float(i), i) for i in range(50)], chosen, seed)
    steps = [samples.numbers_at(4 * step, 4) for step in range(43)]
    rows = [row for ids in steps for row in ids]
    for epoch in range(4):
        assert sorted(rows[43 * epoch : 43 * (epoch + 1)]) == chosen.tolist()
    assert rows[:43] != rows[43:86]
    batch = samples.micro_batch(steps[17])
    assert batch.data[1].tolist() == list(steps[17])
    assert (batch.rows, batch.targets) == (4, 4)
    assert samples.numbers(40, 9) == tuple(chosen[40:].tolist())


def test_random_augmentation_follows_the_place_in_the_run(seed: int) -> None:
    class Noisy:
        def __len__(self) -> int:
            return 9

        def __getitem__(self, index: int) -> tuple[float, float, float]:
            return random.random(), np.random.random(), float(torch.rand(()))

    samples = Samples(Noisy(), np.arange(9), seed)

    def drawn(numbers: tuple[int, ...], place: int | None) -> list[tuple[float, ...]]:
        joined = samples.micro_batch(numbers, place).data
        return list(zip(*(part.tolist() for part in joined), strict=True))

    whole = drawn((5, 2, 7, 2), 12)
    random.random(), np.random.random(), torch.rand(3)
    assert [*drawn((5,), 12), *drawn((2, 7, 2), 13)] == whole
    assert len({*whole, *drawn((5, 2, 7, 2), 16)}) == 8
    assert drawn((3, 4), None) == [*drawn((3,), None), *drawn((4,), None)]
    assert drawn((3,), None) != drawn((3,), 3)


def test_targets_and_collate_are_the_users_where_given() -> None:
    class Texts(list):
        def collate(self, found: list[list[int]]) -> Tensor:
            return torch.tensor([[token for text in found for token in text]])

    samples = Samples(Texts([[1, 2], [3], [4, 5, 6]]), np.arange(3), 0, targets=len)
    batch = samples.micro_batch((2, 0))
    assert (batch.data.tolist(), batch.rows, batch.targets) == ([[4, 5, 6, 1, 2]], 2, 5)


@pytest.mark.parametrize(
    ("dataset", "said"),
    [(iter([1]), "has no length or no samples by number"), ([], "gave an empty data set")],
)
def test_what_is_no_data_set_is_refused(user: Callable[[Any], str], dataset: Any, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        open_dataset(user(lambda: dataset), {}, 0)
    assert said in str(caught.value)


def test_a_sample_that_fails_is_named() -> None:
    class Bad:
        def __len__(self) -> int:
            return 3

        def __getitem__(self, index: int) -> int:
            raise OSError("unreadable")

    with pytest.raises(ConfigError, match=r"sample 2 of the data set failed with OSError: unreadable"):
        Samples(Bad(), np.array([2]), 0).micro_batch((2,))
