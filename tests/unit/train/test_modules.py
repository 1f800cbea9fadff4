"""What has changed in a user's modules since a run began, in words; what is measured and imported."""

from __future__ import annotations

from typing import Any

import pytest

from packmule.errors import ConfigError
from packmule.shapes.module import Cost, ModulePart, ModuleShape, TensorRecord, ValidationSamples
from packmule.train.modules import check_imports, data_key, micro_sizes, refuse_changed


def shape(blocks: int = 2, dataset: str = "mine:samples", **changes: Any) -> ModuleShape:
    """A model of equal blocks; `changes` are to the last block's weight, by field."""
    parts = []
    for name in ("embed", *(f"blocks.{index}" for index in range(blocks)), "head"):
        weight: dict[str, Any] = {"name": "weight", "shape": (3, 4), "role": "matrix"}
        if name == f"blocks.{blocks - 1}":
            weight |= changes
        records = (TensorRecord(**weight), TensorRecord(name="bias", shape=(3,), role="norm"))
        parts.append(ModulePart(name=name, kind=0, row_shape=(3,), parameters=records))
    cost = Cost(rows=8, forward_bytes=1, backward_bytes=1, forward_seconds=1e-3, backward_seconds=1e-3)
    return ModuleShape(
        factory="mine:model", dataset=dataset, precision="fp32", samples=30, mean_targets=1.0,
        parts=tuple(parts), costs=((cost,),), build_bytes=0, resident_bytes=0,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("now", "said"),
    [
        (shape(3), "`mine:model` gives 3 blocks, and gave 2."),
        (shape(shape=(4, 3)), "`blocks.1.weight` is [4, 3] (matrix), and was [3, 4] (matrix)"),
        (shape(role="embedding"), "`blocks.1.weight` is [3, 4] (embedding), and was [3, 4] (matrix)"),
        (shape(name="other"), "`blocks.1` has no parameter `weight`, which it had"),
        (shape(aliases=("also",)), "`blocks.1.weight` is [3, 4] (matrix, also `also`), and was [3, 4]"),
    ],
)
def test_modules_that_changed_are_refused_with_the_first_difference(now: ModuleShape, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        refuse_changed(shape(), now)
    assert said in caught.value.cause
    refuse_changed(now, now)


def test_every_size_that_a_plan_may_cut_is_measured_and_one_sample_too() -> None:
    assert micro_sizes([(7, 7, 6), (20,)]) == (1, 6, 7, 20)


def test_a_data_set_is_known_by_what_made_it_not_by_where_that_lies() -> None:
    key = data_key(shape(dataset="a/vit.py:digits"))
    assert key == data_key(shape(dataset="/else/vit.py:digits"))
    assert len({key, data_key(shape()), data_key(shape().model_copy(update={"samples": 31}))}) == 3


def test_only_what_the_caller_names_is_imported() -> None:
    found = shape(dataset="other/data.py:samples")
    check_imports(found, ("mine", "other/data.py"))
    with pytest.raises(ConfigError) as caught:
        check_imports(found, ())
    assert caught.value.hint == "if they are yours, say so: --import mine --import other/data.py"
    own = ValidationSamples(dataset="third:samples", samples=4)
    judged = found.model_copy(update={"validation": own})
    check_imports(judged, ("mine", "other/data.py", "third"))
    with pytest.raises(ConfigError) as caught:
        check_imports(judged, ("mine", "other/data.py"))
    assert caught.value.cause == (
        "This run was trained with `mine:model`, `other/data.py:samples` and `third:samples`, which have to "
        "be imported."
    )
    assert caught.value.hint == "if they are yours, say so: --import third"
    with pytest.raises(ConfigError) as caught:
        check_imports(found, ("mine", "data"))
    assert caught.value.hint == "if they are yours, say so: --import other/data.py"
