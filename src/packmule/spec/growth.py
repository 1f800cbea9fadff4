"""Growth: how many rows each step trains on while the batch warms up, as pure arithmetic.

The rows of a step double in stages of equal length until they are those of the global batch
(increasing the batch in steps: Smith et al. 2018, arXiv:1711.00489). Where a step's rows start in
the stream of rows follows from the step alone, so resuming needs no history.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from packmule.spec.records import Record


class Growth(Record):
    """Batch warm-up, and how the learning rate follows the rows of a step."""

    start_rows: int = Field(ge=1, description="rows of the first step")
    steps: int = Field(ge=1, description="steps until the global batch is whole")

    def stages(self, rows: int) -> list[tuple[int, int]]:
        """(first step, rows of a step) of each stage, the whole batch last.

        Args:
            rows: of the global batch.
        """
        sizes = [self.start_rows]
        while sizes[-1] < rows:
            sizes.append(min(rows, 2 * sizes[-1]))
        count = len(sizes) - 1
        starts = [0, *(self.steps * index // count for index in range(1, count)), self.steps]
        return list(zip(starts[: count + 1], sizes, strict=True)) if count else [(0, rows)]


Scaling = Literal["off", "linear", "sqrt"]
"""How the learning rate follows the rows of a step: in proportion (Goyal et al. 2017,
arXiv:1706.02677) or to their square root (for Adam: Malladi et al. 2022, arXiv:2205.10287)."""


def rows_at(growth: Growth | None, rows: int, step: int) -> int:
    """Rows of a step (counted from 0) of a run whose global batch is `rows`."""
    if growth is None:
        return rows
    return next(size for start, size in reversed(growth.stages(rows)) if step >= start)


def rows_before(growth: Growth | None, rows: int, step: int) -> int:
    """Rows of all steps before `step`: the cursor of a run that has done `step` steps."""
    if growth is None:
        return rows * step
    stages, total = growth.stages(rows), 0
    for index, (start, size) in enumerate(stages):
        stop = stages[index + 1][0] if index + 1 < len(stages) else step
        total += size * max(0, min(step, stop) - start)
    return total


def steps_for(growth: Growth | None, rows: int, wanted: int) -> int:
    """The least number of steps, at least 1, that train on `wanted` rows."""
    if growth is None:
        return max(1, -(-wanted // rows))
    last = growth.stages(rows)[-1][0]
    before = rows_before(growth, rows, last)
    if wanted > before:
        return last + -(-(wanted - before) // rows)
    return next(step for step in range(1, last + 1) if rows_before(growth, rows, step) >= wanted)
