"""State that is damaged while a run goes on: named by the step that reads it, before it is used."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from tests.exactness.runs import make_case, make_plan, step_engine, tiny_shape

from packmule.errors import DamagedFile
from packmule.kernels.contract import Kernels
from packmule.spec.plan import Placement


@pytest.mark.parametrize("update", ["on-backward", "on-fetch", "after-backward"])
@pytest.mark.parametrize("weights", ["state", "ram"])
@pytest.mark.parametrize("rule", ["adamw", "adalomo"])
def test_a_damaged_chunk_ends_the_step_that_reads_it(
    update: str, weights: str, rule: str, kernels: Kernels, tmp_path: Path, seed: int
) -> None:
    rng = random.Random(seed)
    plan = make_plan(
        placement=Placement(state="disk", weights=weights), update=update, clip=None, optimizer={"rule": rule}
    )
    case = make_case(tiny_shape(tied=False), plan, 3, seed, kernels)
    case.start(tmp_path / "run", kernels)
    engine, _ = case.open(tmp_path / "run", kernels)
    for step in range(2):
        step_engine(engine, case.data, step)
    store = engine.runtime.writable
    head, layout = store.head, store.layout
    assert head is not None
    block = rng.randrange(len(layout.blocks))
    index = rng.randrange(len(layout.chunks(block)))
    # on-fetch reads what HEAD names now; the others have just committed it.
    at = layout.chunk_offset(block, head.blocks[block].slot, index)
    with (tmp_path / "run" / "state.bin").open("r+b") as file:
        file.seek(at + rng.randrange(layout.chunks(block)[index].bytes))
        byte = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([byte ^ 1 << rng.randrange(8)]))
    with pytest.raises(DamagedFile, match=f"block {layout.blocks[block].name}, plane .* is damaged"):
        step_engine(engine, case.data, 2)
    engine.close()
