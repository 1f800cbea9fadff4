"""The map of state.bin: every byte has one place, and JSON says which."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from packmule.checkpoint.layout import LayoutRecord, StateLayout
from packmule.errors import ConfigError
from packmule.shapes.layout import PAGE
from packmule.shapes.model import Block, ModelShape, Parameter

shapes = st.lists(
    st.lists(st.lists(st.integers(1, 70), min_size=1, max_size=2).map(tuple), min_size=1, max_size=3),
    min_size=1,
    max_size=4,
)


@st.composite
def layouts(draw: st.DrawFn) -> StateLayout:
    blocks = tuple(
        Block(i, f"block{i}", "layer", tuple(Parameter(f"w{j}", s, "matrix") for j, s in enumerate(tensors)))
        for i, tensors in enumerate(draw(shapes))
    )
    planes = draw(st.sampled_from([("master",), ("master", "m", "v")]))
    layout = StateLayout.of(
        blocks,
        planes,
        draw(st.sampled_from(["float32", "float64"])),
        draw(st.sampled_from([4096, 8192, 1 << 20])),
    )
    return layout.with_slots(draw(st.sampled_from([1, 2])))


@given(layouts())
def test_chunks_of_all_slots_cover_the_file_once(layout: StateLayout) -> None:
    ranges = sorted(
        (start := layout.chunk_offset(block, slot, index), start + chunk.bytes)
        for block in range(len(layout.blocks))
        for slot in range(layout.slots)
        for index, chunk in enumerate(layout.chunks(block))
    )
    assert ranges[0][0] == 0 and ranges[-1][1] == layout.bytes
    assert all(end == start for (_, end), (start, _) in pairwise(ranges))
    assert all(start % PAGE == 0 and 0 < end - start <= layout.chunk_bytes for start, end in ranges)


@given(layouts())
def test_chunk_index_is_plane_times_pieces_plus_piece(layout: StateLayout) -> None:
    for block in range(len(layout.blocks)):
        pieces = layout.pieces(block)
        for index, chunk in enumerate(layout.chunks(block)):
            assert (chunk.plane, chunk.start) == (index // pieces, index % pieces * layout.chunk_bytes)


@given(layouts())
def test_json_reads_back_to_the_same_layout(layout: StateLayout) -> None:
    record = LayoutRecord.parse_json(layout.record().to_json(), "HEAD.json")
    assert StateLayout.from_record(record, "HEAD.json") == layout


@given(layouts(), st.data())
def test_a_record_with_another_offset_is_refused(layout: StateLayout, data: st.DataObject) -> None:
    plain = layout.record().model_dump()
    block = data.draw(st.sampled_from(plain["blocks"]))
    tensor = data.draw(st.sampled_from(block["tensors"]))
    target, key = data.draw(
        st.sampled_from([(plain, "bytes"), (block, "offset"), (block, "plane_bytes"), (tensor, "offset")])
    )
    target[key] += PAGE
    with pytest.raises(ConfigError, match=r"HEAD.json: `layout` does not follow"):
        StateLayout.from_record(LayoutRecord.parse(plain, "HEAD.json"), "HEAD.json")


def test_the_sum_of_planes_is_the_model_with_padding() -> None:
    shape = ModelShape(1000, 64, 3, 4, 2, 16, 128, 1e-5, 1e4, True, 128)
    layout = StateLayout.of(shape.blocks(), ("master", "m", "v"), "float32", 1 << 20)
    tensors = sum(len(block.parameters) for block in shape.blocks())
    assert 0 <= layout.plane_bytes - 4 * shape.numel < PAGE * tensors
    assert layout.bytes == 2 * 3 * layout.plane_bytes


@pytest.mark.parametrize("chunk_bytes", [0, -4096, 2048, 4097, 12288])
def test_chunk_bytes_must_be_a_power_of_two_of_pages(chunk_bytes: int) -> None:
    block = Block(0, "embed", "embed", (Parameter("weight", (4, 4), "embedding"),))
    with pytest.raises(ConfigError, match="power of two"):
        StateLayout.of((block,), ("master",), "float32", chunk_bytes)
