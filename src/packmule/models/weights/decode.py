"""Bytes of a weight file -> float32, and float32 -> the dtypes an export writes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from packmule.errors import DataError

_FLOATS = {"F64": "<f8", "F32": "<f4", "F16": "<f2"}


def decoder(kind: str) -> Callable[[np.ndarray], np.ndarray] | None:
    """How to decode rows of an encoding, or None when it is unknown.

    The decoder takes uint8 [rows, row_bytes] and returns float32 [rows, columns]. F64, F32, F16
    and BF16 are decoded here; ggml's quantized types by gguf.quants.
    """
    if kind in _FLOATS:
        dtype = np.dtype(_FLOATS[kind])
        return lambda raw: raw.view(dtype).astype(np.float32, copy=False)
    if kind == "BF16":
        return lambda raw: (raw.view("<u2").astype(np.uint32) << np.uint32(16)).view(np.float32)
    return _quantized(kind)


def row_bytes(kind: str, columns: int) -> int | None:
    """Bytes of a row in an encoding that `decoder` knows, or None where it has no such row."""
    if kind in _FLOATS or kind == "BF16":
        return columns * (2 if kind == "BF16" else np.dtype(_FLOATS[kind]).itemsize)
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    group, group_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    return None if columns % group else columns // group * group_bytes


def _quantized(kind: str) -> Callable[[np.ndarray], np.ndarray] | None:
    from gguf import GGMLQuantizationType, quants

    if kind not in GGMLQuantizationType.__members__:
        return None
    quantization = GGMLQuantizationType[kind]
    try:
        # one block of zeros tells whether gguf can decode the type
        quants.dequantize(
            np.zeros((1, quants.quant_shape_to_byte_shape((256,), quantization)[0]), np.uint8), quantization
        )
    except (NotImplementedError, KeyError, ValueError):
        return None

    def decode(raw: np.ndarray) -> np.ndarray:
        # damaged scales give infinities and NaN, which training finds; numpy need not warn as well
        with np.errstate(all="ignore"):
            return quants.dequantize(raw, quantization)

    return decode


def to_bfloat16(values: np.ndarray) -> np.ndarray:
    """uint16 bit patterns of float32 values rounded to nearest even; NaN stays NaN.

    Args:
        values: float32, any shape.
    """
    bits = values.astype(np.float32, copy=False).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    quiet = (bits >> np.uint32(16)) | np.uint32(0x40)
    return np.where(np.isnan(values), quiet, rounded).astype("<u2")


def encode(values: np.ndarray, kind: str, name: str) -> np.ndarray:
    """Floats as F32, F16 or BF16, rounded to nearest even; BF16 as uint16 bit patterns.

    Args:
        values: float32 or float64, any shape; float64 is rounded to float32 first.
        name: of the tensor, for the message.

    Raises:
        DataError: F16 cannot hold a finite value.
    """
    narrow = np.ascontiguousarray(values, "<f4")
    if kind == "F32":
        return narrow
    if kind == "BF16":
        return to_bfloat16(narrow)
    with np.errstate(over="ignore"):
        half = narrow.astype("<f2")
    if (np.isinf(half) & np.isfinite(narrow)).any():
        raise DataError(f"{name} has values beyond float16's range.", "write bfloat16 or float32")
    return half
