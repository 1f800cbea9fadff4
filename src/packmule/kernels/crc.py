"""CRC-32C in numpy: the oracle of the native one, and what runs where it is not built.

The CRC register is linear over GF(2), so a buffer is cut into lanes that step together, a
byte of each at a time, and the lanes' registers are joined pairwise: register(a + b) =
shift(register(a), len(b)) ^ register(b) (zlib's crc32_combine).
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from typing_extensions import Buffer

POLYNOMIAL = 0x82F63B78
LANES = 4096


@lru_cache(maxsize=1)
def table() -> np.ndarray:
    """uint32 [256]: the register after each byte, from zero."""
    entries: np.ndarray = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        entries = (entries >> 1) ^ np.where(entries & 1, np.uint32(POLYNOMIAL), np.uint32(0))
    return entries


def _apply(matrix: np.ndarray, registers: np.ndarray) -> np.ndarray:
    """Multiply registers (uint32 [n]) by a 32x32 matrix over GF(2), column k at index k."""
    out = np.zeros_like(registers)
    for bit in range(32):
        out ^= np.where((registers >> np.uint32(bit)) & 1, matrix[bit], np.uint32(0))
    return out


def _shift(nbytes: int) -> np.ndarray:
    """The matrix that passes nbytes zero bytes through a register."""
    columns = np.uint32(1) << np.arange(32, dtype=np.uint32)
    power = (columns >> np.uint32(8)) ^ table()[columns & 0xFF]
    result = columns
    while nbytes:
        if nbytes & 1:
            result = _apply(power, result)
        power = _apply(power, power)
        nbytes >>= 1
    return result


def crc32c(buffer: Buffer, value: int = 0) -> int:
    """CRC-32C (Castagnoli; RFC 3720) of a contiguous buffer, going on from `value`."""
    data = np.frombuffer(memoryview(buffer).cast("B"), dtype=np.uint8)
    entries = table()
    register = (value ^ 0xFFFFFFFF) & 0xFFFFFFFF
    span = len(data) // LANES
    if span:
        body = data[: span * LANES].reshape(LANES, span)
        lanes = np.zeros(LANES, dtype=np.uint32)
        lanes[0] = register
        for column in np.ascontiguousarray(body.T):
            lanes = (lanes >> np.uint32(8)) ^ entries[(lanes ^ column) & np.uint32(0xFF)]
        while len(lanes) > 1:
            lanes = _apply(_shift(span), lanes[0::2]) ^ lanes[1::2]
            span *= 2
        register = int(lanes[0])
        data = data[span:]
    plain = entries.tolist()
    for byte in data.tobytes():
        register = (register >> 8) ^ plain[(register ^ byte) & 0xFF]
    return register ^ 0xFFFFFFFF
