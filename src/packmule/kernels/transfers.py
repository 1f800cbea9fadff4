"""Transfers: chunks to and from files with their CRC-32C, in csrc and without the GIL. Imports no torch."""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from packmule.kernels.native import open_library

BLOCK_BYTES = 1 << 20
"""Of one transfer under way that is summed; a span of more is several. Unsummed ones take four times that."""


class Span(NamedTuple):
    """A buffer and the byte of the file where it begins."""

    buffer: memoryview
    offset: int


def address(buffer: memoryview) -> int:
    """Where a buffer lies in memory."""
    if buffer.readonly or not buffer.nbytes:
        return int(np.frombuffer(buffer, np.uint8).__array_interface__["data"][0])
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))


class TransferFailed(Exception):
    """A transfer ended early.

    Args:
        span: which of the spans.
        moved: bytes of it that arrived.
        number: of the error; None where the file ends.
    """

    def __init__(self, span: int, moved: int, number: int | None) -> None:
        super().__init__(f"span {span} stopped after {moved:,} bytes: error {number}")
        self.span, self.moved, self.number = span, moved, number


class Transfers:
    """Moves many spans per call: some blocks under way, each summed beside the others.

    Calls from several threads take turns.

    Args:
        ring: use an io_uring where the kernel has one; else threads.

    Attributes:
        ring: whether it does.

    Raises:
        ValueError: the library is not built.
        OSError: no thread can be started.
    """

    def __init__(self, ring: bool = True) -> None:
        library = open_library()
        self._call = library.pm_transfer
        self._made = library.pm_transfers_create(int(ring))
        if not self._made:
            raise OSError("cannot start a thread for transfers")
        self.ring = bool(library.pm_transfers_ring(self._made))
        self._lock = threading.Lock()
        weakref.finalize(self, library.pm_transfers_destroy, self._made)

    def run(
        self, file: int, write: bool, direct: bool, spans: Sequence[Span], summed: bool = True
    ) -> list[int]:
        """Fill or write every span; the CRC-32C of each.

        Args:
            file: an open file's number.
            direct: buffers, offsets and sizes are multiples of 4096 bytes.
            summed: False leaves the sums out: none is returned.

        Raises:
            TransferFailed: nothing is under way any more.
        """
        count = len(spans)
        data = (ctypes.c_void_p * count)(*[address(span.buffer) for span in spans])
        sizes = (ctypes.c_int64 * count)(*[span.buffer.nbytes for span in spans])
        offsets = (ctypes.c_int64 * count)(*[span.offset for span in spans])
        sums = (ctypes.c_uint32 * count)() if summed else None
        failed, moved = ctypes.c_int(), ctypes.c_int64()
        with self._lock:
            rc = self._call(
                self._made, file, write, direct, count, data, sizes, offsets, sums,
                ctypes.byref(failed), ctypes.byref(moved),
            )  # fmt: skip
        if rc:
            raise TransferFailed(failed.value, moved.value, None if rc < 0 else rc)
        return [] if sums is None else list(sums)
