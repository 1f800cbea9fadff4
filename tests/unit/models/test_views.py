"""Typed views of one buffer."""

from __future__ import annotations

import pytest
import torch

from packmule.models.views import TORCH_DTYPES, views
from packmule.shapes.layout import ITEMSIZE, TensorSpec, layout


def test_views_share_the_buffer_and_do_not_overlap() -> None:
    specs = [TensorSpec(name, (3, 5), name) for name in ITEMSIZE]
    place = layout(specs)
    buffer = torch.zeros(place.bytes + 64, dtype=torch.uint8)
    made = views(buffer, place)
    for value, (name, tensor) in enumerate(made.items(), start=1):
        assert tensor.dtype == TORCH_DTYPES[name]
        assert tensor.shape == (3, 5)
        assert tensor.data_ptr() == buffer.data_ptr() + place[name].offset
        tensor.fill_(value)
    for value, tensor in enumerate(made.values(), start=1):
        assert bool((tensor == value).all())
    assert not buffer[place.bytes :].any()


def test_a_short_buffer_is_refused() -> None:
    place = layout([TensorSpec("x", (100,), "float32")])
    with pytest.raises(ValueError, match="448 bytes does not fit a buffer of 447"):
        views(torch.zeros(447, dtype=torch.uint8), place)
