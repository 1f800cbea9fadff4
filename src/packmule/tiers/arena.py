"""Arena: the one allocation that holds every buffer in RAM."""

from __future__ import annotations

import contextlib
import mmap

from packmule.shapes.layout import PAGE, round_up


class Arena:
    """Anonymous, page-aligned memory with huge pages where the kernel gives them.

    Args:
        size: bytes; at least one page is taken.
    """

    def __init__(self, size: int) -> None:
        self.bytes = max(PAGE, round_up(size, PAGE))
        self._map = mmap.mmap(-1, self.bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            # Where huge pages are off this fails or does nothing; small pages then serve.
            with contextlib.suppress(OSError):
                self._map.madvise(mmap.MADV_HUGEPAGE)
        self.memory = memoryview(self._map)

    def view(self, offset: int, size: int) -> memoryview:
        """Some of its bytes."""
        return self.memory[offset : offset + size]

    def touch(self) -> None:
        """Back every page now, so that the memory is ours before step 1."""
        import numpy as np

        np.frombuffer(self.memory, np.uint8)[::PAGE] = 0
