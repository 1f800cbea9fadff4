"""The header of a GGUF file (versions 2 and 3): metadata and where each tensor lies.

Read with small buffered reads, so the file is never mapped and large arrays that nobody asked for
are skipped. Format: ggml's docs/gguf.md. Weights are decoded in packmule.models.weights.
"""

from __future__ import annotations

import struct
from collections.abc import Collection
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from packmule.data.files import Reader
from packmule.errors import DataError

_SCALARS = {
    0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4",
    6: "<f4", 7: "<u1", 10: "<u8", 11: "<i8", 12: "<f8",
}  # fmt: skip
_BOOL, _STRING, _ARRAY = 7, 8, 9
_MAX_DIMENSIONS = 4
MAX_HEADER_BYTES = 1 << 26
"""Bounds, several times what the largest vocabularies need, on what a damaged header can allocate."""
_MAX_KEYS, _MAX_TENSORS, _MAX_STRING_BYTES, _MAX_ARRAY = 1 << 16, 1 << 20, 1 << 24, 1 << 22
_WHOLE = ("the file is truncated or damaged; get it again",)


class GgufTensor(NamedTuple):
    """One tensor of the file.

    Attributes:
        shape: rows first, as numpy and Hugging Face write it (GGUF stores it reversed).
        type: ggml's name of its encoding: "F32", "Q4_1", ...
        offset: bytes from the beginning of the file.
        bytes: its length in the file.
    """

    name: str
    shape: tuple[int, ...]
    type: str
    offset: int
    bytes: int


@dataclass(frozen=True)
class GgufHeader:
    """Metadata by key, tensors by name; `bytes` is the length of the header itself.

    String arrays are lists of str, other arrays numpy arrays, skipped arrays are absent.
    """

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]
    bytes: int

    def require(self, key: str) -> Any:
        """The metadata value of a key.

        Raises:
            DataError: the file has no such key.
        """
        if key not in self.metadata:
            raise DataError(f"{self.path}: the GGUF metadata has no {key!r}.", "convert the model again")
        return self.metadata[key]

    def count(self, key: str, default: int | None = None) -> int:
        """A positive integer of the metadata.

        Raises:
            DataError: it is missing without a default, or not a positive integer.
        """
        value = self.require(key) if default is None else self.metadata.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise DataError(f"{self.path}: {key!r} is {value!r}, not a positive integer.", *_WHOLE)
        return value


def read_gguf(path: Path, arrays: Collection[str] = ()) -> GgufHeader:
    """Read the header of a GGUF file.

    Args:
        path: the file.
        arrays: the keys whose arrays are kept; others are skipped to save memory.

    Raises:
        DataError: not a GGUF file of version 2 or 3, split over several files, damaged, or with a
            header beyond MAX_HEADER_BYTES.
    """
    try:
        size = path.stat().st_size
        with open(path, "rb", buffering=1 << 16) as file:
            return _Parser(path, file, size).header(frozenset(arrays))
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}.", "check the path") from None


def read_vector(header: GgufHeader, name: str) -> np.ndarray:
    """A small F32 tensor of one dimension: float32 [n].

    Raises:
        DataError: missing, of another kind, or not finite.
    """
    tensor = header.tensors.get(name)
    if tensor is None or tensor.type != "F32" or len(tensor.shape) != 1 or tensor.bytes > 1 << 20:
        raise DataError(f"{header.path}: tensor {name!r} is no vector in F32.", *_WHOLE)
    with Reader(header.path) as reader:
        values = np.frombuffer(reader.read(tensor.offset, tensor.bytes), "<f4")
    if not np.isfinite(values).all():
        raise DataError(f"{header.path}: tensor {name!r} is not finite.", *_WHOLE)
    return values


class _Parser:
    def __init__(self, path: Path, file: BinaryIO, size: int) -> None:
        self.path, self.file, self.size = path, file, size

    def header(self, arrays: frozenset[str]) -> GgufHeader:
        if self.take(4) != b"GGUF":
            raise DataError(f"{self.path} is not a GGUF file.", "give a .gguf file or a Hugging Face folder")
        version = self.integer("<I")
        if version not in (2, 3):
            raise DataError(
                f"{self.path}: GGUF version {version} is not supported.", "supported: 2 and 3, little endian"
            )
        tensors, keys = self.integer("<Q"), self.integer("<Q")
        if tensors > _MAX_TENSORS or keys > _MAX_KEYS:
            raise DataError(f"{self.path} claims {tensors} tensors and {keys} metadata keys.", *_WHOLE)
        metadata: dict[str, Any] = {}
        seen = set[str]()
        for _ in range(keys):
            key = self.string()
            if key in seen:
                raise DataError(f"{self.path}: the metadata has {key!r:.80} twice.", *_WHOLE)
            seen.add(key)
            value = self.value(self.integer("<I"), key in arrays)
            if value is not None:
                metadata[key] = value
        if metadata.get("split.count", 0) not in (0, 1):
            raise DataError(
                f"{self.path} is one of {metadata['split.count']!r:.40} parts of a split GGUF.",
                "join the parts with `llama-gguf-split --merge`",
            )
        raw = [self.tensor_info() for _ in range(tensors)]
        end = self.file.tell()
        align = metadata.get("general.alignment", 32)
        if not isinstance(align, int) or align < 1:
            raise DataError(f"{self.path}: general.alignment is {align!r:.40}.", *_WHOLE)
        start = -(-end // align) * align
        placed = {t.name: self.place(t, start) for t in raw}
        if len(placed) != len(raw):
            raise DataError(f"{self.path}: {len(raw) - len(placed)} tensors are there twice.", *_WHOLE)
        for before, after in pairwise(sorted(placed.values(), key=lambda tensor: tensor.offset)):
            if before.offset + before.bytes > after.offset:
                raise DataError(
                    f"{self.path}: tensors {before.name!r:.80} and {after.name!r:.80} overlap.", *_WHOLE
                )
        return GgufHeader(self.path, metadata, placed, end)

    def place(self, tensor: GgufTensor, start: int) -> GgufTensor:
        placed = tensor._replace(offset=start + tensor.offset)
        if placed.offset + placed.bytes > self.size:
            raise DataError(
                f"{self.path}: tensor {placed.name!r:.80} needs bytes {placed.offset} to "
                f"{placed.offset + placed.bytes}, but the file ends at {self.size}.",
                *_WHOLE,
            )
        return placed

    def tensor_info(self) -> GgufTensor:
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

        name, dimensions = self.string(), self.integer("<I")
        if dimensions > _MAX_DIMENSIONS:
            raise DataError(f"{self.path}: tensor {name!r:.80} has {dimensions} dimensions.", *_WHOLE)
        shape = tuple(reversed([self.integer("<Q") for _ in range(dimensions)]))
        if 0 in shape:
            raise DataError(f"{self.path}: tensor {name!r:.80} has the shape {list(shape)}.", *_WHOLE)
        code, offset = self.integer("<I"), self.integer("<Q")
        try:
            kind = GGMLQuantizationType(code)
        except ValueError:
            raise DataError(
                f"{self.path}: tensor {name!r:.80} has the unknown encoding {code}.",
                "convert the model to F16, Q8_0 or Q4_1",
            ) from None
        group, group_bytes = GGML_QUANT_SIZES[kind]
        if shape and shape[-1] % group:
            raise DataError(
                f"{self.path}: tensor {name!r:.80}: rows of {shape[-1]} do not fit {kind.name}.", *_WHOLE
            )
        return GgufTensor(name, shape, kind.name, offset, prod(shape) // group * group_bytes)

    def value(self, kind: int, keep_arrays: bool) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self.array(keep_arrays)
        if kind not in _SCALARS:
            raise DataError(f"{self.path}: metadata of unknown type {kind}.", *_WHOLE)
        scalar = np.frombuffer(self.take(np.dtype(_SCALARS[kind]).itemsize), _SCALARS[kind])[0]
        return bool(scalar) if kind == _BOOL else scalar.item()

    def array(self, keep: bool) -> list[str] | np.ndarray | None:
        kind, count = self.integer("<I"), self.integer("<Q")
        if count > _MAX_ARRAY:
            raise DataError(f"{self.path}: a metadata array claims {count} values.", *_WHOLE)
        if kind == _STRING:
            # each string has at least its 8-byte length, so a false count is caught before memory is
            self.fits(8 * count)
            if keep:
                return [self.string() for _ in range(count)]
            for _ in range(count):
                self.skip(self.integer("<Q"))
            return None
        if kind not in _SCALARS:
            raise DataError(f"{self.path}: metadata array of unsupported type {kind}.", *_WHOLE)
        dtype = np.dtype(_SCALARS[kind])
        self.fits(count * dtype.itemsize)
        if keep:
            return np.frombuffer(self.take(count * dtype.itemsize), dtype)
        self.skip(count * dtype.itemsize)
        return None

    def string(self) -> str:
        length = self.integer("<Q")
        if length > _MAX_STRING_BYTES:
            raise DataError(f"{self.path}: a metadata string claims {length} bytes.", *_WHOLE)
        self.fits(length)
        data = self.take(length)
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError:
            raise DataError(
                f"{self.path}: the metadata string {data[:40]!r} is not UTF-8.", *_WHOLE
            ) from None

    def integer(self, form: str) -> int:
        return int(struct.unpack(form, self.take(struct.calcsize(form)))[0])

    def fits(self, length: int) -> None:
        end = self.file.tell() + length
        if end > self.size:
            raise DataError(f"{self.path}: the header reaches beyond the file's {self.size} bytes.", *_WHOLE)
        if end > MAX_HEADER_BYTES:
            raise DataError(f"{self.path}: the header is longer than {MAX_HEADER_BYTES >> 20} MiB.", *_WHOLE)

    def take(self, length: int) -> bytes:
        data = self.file.read(length)
        if len(data) != length:
            raise DataError(f"{self.path} ends inside its header.", *_WHOLE)
        return data

    def skip(self, length: int) -> None:
        self.fits(length)
        self.file.seek(length, 1)
