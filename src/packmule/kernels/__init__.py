"""Compute kernels: one contract, two families. `load` picks one. Nothing else lives here.

contract   the protocol `Kernels`, with shapes and dtypes
native     `NativeKernels`: csrc through ctypes; loads no torch
reference  `TorchKernels`: the readable twin in torch
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from typing_extensions import Buffer

    from packmule.kernels.contract import Kernels

__all__ = ["checksum", "load"]


def load(threads: int, isa: str | None = None, share: bool = False) -> Kernels:
    """The kernels for this machine.

    Args:
        threads: threads a call may use, at least 1; never changes a result.
        isa: "scalar", "avx2" or "avx512" asks for one build of the native library; None takes
            the widest this CPU runs, or the torch twin where the library is not built;
            "torch" asks for the twin.
        share: run on torch's threads where they can be found (torch must be imported, and the
            calling thread is the one that will compute).

    Raises:
        ValueError: threads below 1, an unknown isa, or one this CPU or build lacks.
    """
    if threads < 1:
        raise ValueError(f"threads is {threads}, expected at least 1")
    if isa != "torch":
        from packmule.kernels import native

        if isa is not None or native.library_path() is not None:
            return native.NativeKernels(threads, isa, native.openmp_team() if share else None)
    from packmule.kernels.reference import TorchKernels

    return TorchKernels(threads)


def checksum() -> Callable[[Buffer], int]:
    """CRC32C of a buffer: native where the library is built, else in numpy. Loads no torch."""
    from packmule.kernels import crc, native

    if native.library_path() is not None:
        return native.NativeKernels(1).crc32c
    return crc.crc32c
