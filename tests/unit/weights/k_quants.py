"""ggml's K-quants decoded by plain loops over one block of 256 (ggml/src/ggml-quants.c), in Python floats."""

from __future__ import annotations

import numpy as np

BLOCK_BYTES = {"Q2_K": 84, "Q3_K": 110, "Q4_K": 144, "Q5_K": 176, "Q6_K": 210}
HALVES = {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
"""Where a block's float16 scales lie."""


def random_rows(kind: str, rows: int, blocks: int, rng: np.random.Generator) -> np.ndarray:
    """uint8 [rows, bytes]: any bits, but scales that are ordinary numbers."""
    size = BLOCK_BYTES[kind]
    data = rng.integers(0, 256, (rows, blocks, size), np.uint8)
    for at in HALVES[kind]:
        scales = rng.standard_normal((rows, blocks)).astype("<f2")
        data[:, :, at : at + 2] = scales[..., None].view(np.uint8)
    return data.reshape(rows, blocks * size)


def decode(kind: str, raw: np.ndarray) -> np.ndarray:
    """float64 [rows, 256 * blocks] of uint8 [rows, bytes]."""
    size = BLOCK_BYTES[kind]
    one = {"Q2_K": _q2, "Q3_K": _q3, "Q4_K": _q4_q5, "Q5_K": _q4_q5, "Q6_K": _q6}[kind]
    return np.array(
        [[v for at in range(0, len(row), size) for v in one(row[at : at + size].tolist())] for row in raw]
    )


def _half(low: int, high: int) -> float:
    return float(np.frombuffer(bytes([low, high]), "<f2")[0])


def _q2(b: list[int]) -> list[float]:
    scales, d, least, out = b[:16], _half(*b[80:82]), _half(*b[82:84]), []
    for part in (0, 1):
        quants = b[16 + 32 * part : 48 + 32 * part]
        for j in range(4):
            for half in (0, 1):
                scale = scales[8 * part + 2 * j + half]
                for q in quants[16 * half : 16 * half + 16]:
                    out.append(d * (scale & 15) * (q >> 2 * j & 3) - least * (scale >> 4))
    return out


def _q3(b: list[int]) -> list[float]:
    mask, packed, d, out = b[:32], b[96:108], _half(*b[108:110]), []
    for part in (0, 1):
        quants = b[32 + 32 * part : 64 + 32 * part]
        for j in range(4):
            for half in (0, 1):
                i = 8 * part + 2 * j + half
                low = packed[i] & 15 if i < 8 else packed[i - 8] >> 4
                scale = (low | (packed[8 + i % 4] >> 2 * (i // 4) & 3) << 4) - 32
                for at in range(16 * half, 16 * half + 16):
                    high = 0 if mask[at] >> (4 * part + j) & 1 else 4
                    out.append(d * scale * ((quants[at] >> 2 * j & 3) - high))
    return out


def _q4_q5(b: list[int]) -> list[float]:
    five = len(b) == BLOCK_BYTES["Q5_K"]
    d, least, s = _half(*b[0:2]), _half(*b[2:4]), b[4:16]
    high = b[16:48] if five else [0] * 32
    quants, out = b[48:] if five else b[16:], []
    for j in range(8):
        scale = s[j] & 63 if j < 4 else (s[j + 4] & 15) | (s[j - 4] >> 6) << 4
        lower = s[j + 4] & 63 if j < 4 else s[j + 4] >> 4 | (s[j] >> 6) << 4
        for i in range(32):
            q = quants[32 * (j // 2) + i] >> 4 * (j % 2) & 15
            out.append(d * scale * (q + 16 * (high[i] >> j & 1)) - least * lower)
    return out


def _q6(b: list[int]) -> list[float]:
    d, out = _half(*b[208:210]), [0.0] * 256
    for i in range(256):
        part, rest = divmod(i, 128)
        quarter, at = divmod(rest, 32)
        low = b[64 * part + 32 * (quarter % 2) + at] >> 4 * (quarter // 2) & 15
        high = b[128 + 32 * part + at] >> 2 * quarter & 3
        scale = b[192 + 8 * part + 2 * quarter + at // 16]
        out[i] = d * (scale - 256 if scale > 127 else scale) * ((low | high << 4) - 32)
    return out
