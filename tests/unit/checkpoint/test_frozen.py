"""A run written by the first version of format 1 must load for ever.

tests/frozen/run-v1 is never written again; a change that cannot read it needs a new format
number and keeps reading this one. It is a run at step 3 (committed at 0, 1, 2, 3) with a
snapshot of step 1. Element i of tensor t of block b, plane p, after step s is
1000 p + 100 b + 10 t + s + i / 1024.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from packmule.checkpoint.layout import StateLayout
from packmule.checkpoint.reader import StateReader
from packmule.checkpoint.snapshots import newest
from packmule.checkpoint.store import StateStore
from packmule.checkpoint.verify import verify
from packmule.kernels.crc import crc32c
from packmule.shapes.model import Block, Parameter
from packmule.tiers.disk import PosixDisk, aligned_buffer

RUN = Path(__file__).parents[2] / "frozen" / "run-v1"
BLOCKS = (
    Block(0, "embed", "embed", (Parameter("weight", (6, 4), "embedding"),)),
    Block(1, "head", "head", (Parameter("norm.weight", (4,), "norm"), Parameter("weight", (6, 4), "matrix"))),
)
LAYOUT = StateLayout.of(BLOCKS, ("master", "m", "v"), "float32", 4096)


def value(plane: int, block: int, tensor: int, step: int, numel: int) -> np.ndarray:
    return (1000 * plane + 100 * block + 10 * tensor + step + np.arange(numel) / 1024).astype(np.float32)


@pytest.mark.parametrize(("folder", "step", "slots"), [(RUN, 3, 2), (RUN / "checkpoint-1", 1, 1)])
def test_the_frozen_files_read_to_the_same_numbers(folder: Path, step: int, slots: int) -> None:
    disk = PosixDisk()
    assert verify(disk, folder, crc32c).damage == ()
    with StateReader.open(disk, folder, crc32c) as reader:
        assert reader.layout == LAYOUT.with_slots(slots)
        head = reader.head
        assert (head.format, head.step, head.cursor, head.tokens) == (1, step, 8 * step, 100 * step)
        assert head.job_hash == "ab" * 32 and head.model == {"model_type": "llama", "vocab_size": 6}
        assert head.numerics.schedule.learning_rate == 3e-4 and head.numerics.micro_rows == (4, 4)
        buffer = aligned_buffer(2 * 4096)
        for block, entry in enumerate(reader.layout.blocks):
            for plane, name in enumerate(reader.layout.planes):
                reader.read_plane(block, name, buffer)
                for tensor, place in enumerate(entry.tensors.entries):
                    raw = buffer[place.offset : place.offset + place.bytes]
                    expected = value(plane, block, tensor, step, len(raw) // 4)
                    assert raw == expected.astype("<f4").tobytes()


def test_the_frozen_bytes_lie_where_the_format_page_says() -> None:
    """Read without the package: block 1, the current slot, plane `v`, tensor `weight`."""
    head = json.loads((RUN / "HEAD.json").read_text())
    block = head["layout"]["blocks"][1]
    start = block["offset"] + head["blocks"][1]["slot"] * 3 * block["plane_bytes"]
    start += 2 * block["plane_bytes"] + block["tensors"][1]["offset"]
    found = np.fromfile(RUN / "state.bin", "<f4", 24, offset=start)
    assert np.array_equal(found, value(2, 1, 1, 3, 24))


def test_the_frozen_run_goes_on(tmp_path: Path) -> None:
    """On a copy: load, update, commit."""
    run = Path(shutil.copytree(RUN, tmp_path / "run"))
    store = StateStore(PosixDisk(), run, LAYOUT, crc32c)
    head = store.load()
    assert head is not None
    buffer = aligned_buffer(4096)
    for block in range(len(BLOCKS)):
        store.begin(block)
        for index in range(len(LAYOUT.chunks(block))):
            store.read(block, index, buffer)
            store.write(block, index, buffer)
        store.end(block)
    assert store.commit(head.model_copy(update={"step": 4})).step == 4
    assert verify(store.disk, run, crc32c).damage == ()
    assert newest(store.disk, run, crc32c) == run / "checkpoint-1"
