"""Initial weights as chunks of fp32, read from where they lie or drawn from a seed.

A source is opened on a prepared model folder (packmule.data.model_files). Only one chunk is in
memory at a time, and pages read are given back to the kernel.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from math import prod
from pathlib import Path

import numpy as np

from packmule.data.files import Reader
from packmule.data.manifest import Manifest, WeightEntry
from packmule.errors import DataError
from packmule.models.weights.decode import decoder, row_bytes
from packmule.models.weights.names import NAMES, HfTensor, hf_tensor, hf_tensors
from packmule.shapes.model import Block, ModelShape, Parameter

CHUNK_BYTES = 4 << 20
_TILE = 1 << 16
_REPLACE = "give the model again: its files are not what they were when the run began"


class WeightSource(ABC):
    """Every parameter of a model, in chunks."""

    @classmethod
    def open(cls, folder: Path) -> WeightSource:
        """The source that a model folder's weights.json describes.

        Raises:
            DataError, ConfigError: the manifest or a weight file is missing, changed or damaged.
        """
        manifest = Manifest.open(folder)
        return RandomSource(manifest) if manifest.kind == "random" else FileSource(manifest)

    @abstractmethod
    def check(self, shape: ModelShape) -> None:
        """Whether every parameter is there with its shape, and nothing else is.

        Raises:
            DataError: names the tensor and the file.
        """

    @abstractmethod
    def chunks(
        self, block: Block, parameter: Parameter, chunk_bytes: int = CHUNK_BYTES
    ) -> Iterator[tuple[int, np.ndarray]]:
        """One parameter in order.

        Args:
            chunk_bytes: bound of a chunk's float32 bytes, but at least one row (one head for
                rows that must be reordered, one tile of 65536 elements for random weights).

        Yields:
            (index of the chunk's first element in the flat tensor, float32 [n]). The array may
            be overwritten by the next chunk.

        Raises:
            DataError: missing, mis-shaped, of an unknown encoding, or a truncated file.
        """

    @abstractmethod
    def close(self) -> None:
        """Close the files."""

    def __enter__(self) -> WeightSource:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class FileSource(WeightSource):
    """Weights from safetensors or GGUF files, by the manifest's offsets."""

    def __init__(self, manifest: Manifest) -> None:
        self._kind = manifest.kind
        self._entries = {entry.name: entry for entry in manifest.tensors}
        astray = next((e for e in manifest.tensors if e.file >= len(manifest.files)), None)
        if astray is not None:
            raise DataError(f"weights.json: {astray.name!r:.120} is in no file.", _REPLACE)
        self._readers: list[Reader] = []
        try:
            for file in manifest.files:
                self._readers.append(Reader(Path(file.path)))
                if self._readers[-1].bytes != file.bytes:
                    raise DataError(
                        f"{file.path} has {self._readers[-1].bytes} bytes; it had {file.bytes} "
                        "when it was prepared.",
                        _REPLACE,
                    )
        except BaseException:
            self.close()
            raise

    def check(self, shape: ModelShape) -> None:
        pairs = [(block, tensor) for block in shape.cut(1).blocks() for tensor in hf_tensors(block)]
        missing = [tensor.name for block, tensor in pairs if self._found(block, tensor) is None]
        if missing:
            raise self._missing(missing)
        known = set()
        for block, tensor in pairs:
            entry = self._entry(block, tensor)
            self._decoder(entry)
            known.add(entry.name)
        # a tied model may still carry a copy of its embedding, and old ones constant buffers
        ignored = NAMES[shape.family].ignored
        extra = [n for n in self._entries if n not in known and not n.endswith(ignored)]
        extra = [n for n in extra if not (shape.tied and n == "lm_head.weight")]
        if extra:
            raise DataError(
                f"{self._path(self._entries[extra[0]])}: {_listed(extra)} no part of this model.",
                "use the config.json the weights were saved with",
            )

    def chunks(
        self, block: Block, parameter: Parameter, chunk_bytes: int = CHUNK_BYTES
    ) -> Iterator[tuple[int, np.ndarray]]:
        tensor = hf_tensor(block, parameter)
        entry, rows = self._entry(block, tensor), tensor.rows(parameter)
        if len(entry.shape) == 1:
            # A vector is one row of the file, and short.
            whole = entry.model_copy(update={"interleaved_heads": None})
            _, values = next(self._rows(whole, 0, 1, chunk_bytes))
            if entry.interleaved_heads:
                head_dim = len(values) // entry.interleaved_heads
                values = half_rotation(values.reshape(-1, 1), head_dim).reshape(-1)
            yield 0, values[rows]
        elif self._flipped(tensor):
            yield from self._columns(entry, rows, chunk_bytes)
        else:
            yield from self._rows(entry, rows.start, rows.stop, chunk_bytes)

    def _rows(
        self, entry: WeightEntry, start: int, stop: int, chunk_bytes: int
    ) -> Iterator[tuple[int, np.ndarray]]:
        """Rows start..stop-1 of a tensor, as `chunks` gives them."""
        decode, reader = self._decoder(entry), self._readers[entry.file]
        unit = entry.rows // entry.interleaved_heads if entry.interleaved_heads else 1
        step = unit * max(1, chunk_bytes // (unit * entry.columns * 4))
        raw = np.empty(min(step, stop - start) * entry.row_bytes, np.uint8)
        for row in range(start, stop, step):
            rows = min(step, stop - row)
            part = raw[: rows * entry.row_bytes]
            offset = entry.offset + row * entry.row_bytes
            reader.read_into(part, offset)
            reader.forget(offset, len(part))
            values = decode(part.reshape(rows, entry.row_bytes))
            if entry.subtract:
                values = values - np.float32(entry.subtract)
            if entry.interleaved_heads:
                values = half_rotation(values, unit)
            yield (row - start) * entry.columns, np.ascontiguousarray(values).reshape(-1)

    def _columns(
        self, entry: WeightEntry, columns: slice, chunk_bytes: int
    ) -> Iterator[tuple[int, np.ndarray]]:
        """Some columns of a tensor as rows, as `chunks` gives them."""
        decode, reader = self._decoder(entry), self._readers[entry.file]
        item = entry.row_bytes // entry.columns
        step = max(1, chunk_bytes // (entry.rows * 4))
        for first in range(columns.start, columns.stop, step):
            count = min(step, columns.stop - first)
            raw = np.empty((entry.rows, count * item), np.uint8)
            for row in range(entry.rows):
                reader.read_into(raw[row], entry.offset + row * entry.row_bytes + first * item)
            values = np.ascontiguousarray(decode(raw).T)
            yield (first - columns.start) * entry.rows, values.reshape(-1)
        reader.forget(entry.offset, entry.rows * entry.row_bytes)

    def _flipped(self, tensor: HfTensor) -> bool:
        """Whether a tensor lies in the file as its parameters' transpose: GGUF has none of those."""
        return tensor.transposed and self._kind != "gguf"

    def close(self) -> None:
        for reader in self._readers:
            reader.close()

    def _found(self, block: Block, tensor: HfTensor) -> WeightEntry | None:
        name, names = tensor.name, NAMES[block.family]
        others = (name, name.removeprefix(names.prefix), names.stacked(name))
        return next((self._entries[other] for other in others if other in self._entries), None)

    def _missing(self, names: list[str]) -> DataError:
        where = ", ".join(str(reader.path) for reader in self._readers[:3])
        return DataError(
            f"{_listed(names)} missing in {where}.", "get the model again, or correct its config.json"
        )

    def _path(self, entry: WeightEntry) -> Path:
        return self._readers[entry.file].path

    def _entry(self, block: Block, tensor: HfTensor) -> WeightEntry:
        name = tensor.name
        entry = self._found(block, tensor)
        if entry is None:
            raise self._missing([name])
        expected = tensor.shape if self._flipped(tensor) else tensor.whole
        if entry.shape != expected:
            raise DataError(
                f"{self._path(entry)}: tensor {name!r} has shape {list(entry.shape)}, "
                f"but config.json asks for {list(expected)}.",
                "use the config.json the weights were saved with",
            )
        return entry

    def _decoder(self, entry: WeightEntry) -> Callable[[np.ndarray], np.ndarray]:
        decode = decoder(entry.type)
        if decode is None:
            raise DataError(
                f"{self._path(entry)}: tensor {entry.name!r} is stored as {entry.type}, "
                "which cannot be decoded.",
                "convert the model to F32, F16, BF16, Q8_0 or Q4_1",
            )
        pairs = 2 * entry.interleaved_heads if entry.interleaved_heads else 1
        turned = entry.columns if len(entry.shape) == 1 else entry.rows
        if row_bytes(entry.type, entry.columns) != entry.row_bytes or turned % pairs:
            raise DataError(
                f"{self._path(entry)}: tensor {entry.name!r:.120}: rows of {entry.row_bytes} bytes are not "
                f"{entry.columns} values of {entry.type}.",
                _REPLACE,
            )
        return decode


def _listed(names: list[str]) -> str:
    """ "tensor 'a' is", or "tensors 'a', 'b', 'c' and 4 more are"."""
    if len(names) == 1:
        return f"tensor {names[0]!r:.120} is"
    shown = ", ".join(f"{name!r:.120}" for name in names[:3])
    return f"tensors {shown}{f' and {len(names) - 3} more' if len(names) > 3 else ''} are"


class RandomSource(WeightSource):
    """Fresh weights as transformers draws them: normal with the config's deviation times the
    parameter's `start`; norms and biases are their `start`.

    Each tile of 65536 elements has its own Philox stream (Salmon et al. 2011) keyed by seed, block
    and parameter, so a tensor does not depend on chunk size or on what was drawn before.
    """

    def __init__(self, manifest: Manifest) -> None:
        self._seed, self._deviation = manifest.seed, np.float32(manifest.deviation)

    def check(self, shape: ModelShape) -> None:
        return None

    def chunks(
        self, block: Block, parameter: Parameter, chunk_bytes: int = CHUNK_BYTES
    ) -> Iterator[tuple[int, np.ndarray]]:
        # Tiles are those of the whole tensor; the first and last of a part are drawn whole and cut.
        start = block.first_row(parameter.name) * prod(parameter.shape[1:])
        stop = start + prod(parameter.shape)
        step = _TILE * max(1, chunk_bytes // (4 * _TILE))
        for low in range(start // _TILE * _TILE, stop, step):
            values = np.empty(min(step, -(-(stop - low) // _TILE) * _TILE), np.float32)
            for at in range(0, len(values), _TILE):
                part = values[at : at + _TILE]
                if parameter.role in ("norm", "bias"):
                    part.fill(parameter.start)
                else:
                    self._stream(block, parameter, (low + at) // _TILE).standard_normal(
                        dtype=np.float32, out=part
                    )
                    part *= self._deviation * np.float32(parameter.start)
            first = max(start, low)
            yield first - start, values[first - low : stop - low]

    def close(self) -> None:
        return None

    def _stream(self, block: Block, parameter: Parameter, tile: int) -> np.random.Generator:
        whole = block.whole
        place = [own.name for own in whole.parameters].index(parameter.name)
        key = np.array([self._seed % (1 << 64), (whole.index << 32) | place], np.uint64)
        counter = np.array([0, tile, 0, 0], np.uint64)
        return np.random.Generator(np.random.Philox(key=key, counter=counter))


def half_rotation(rows: np.ndarray, head_dim: int) -> np.ndarray:
    """Rows of whole heads from GGUF's RoPE order to Hugging Face's.

    GGUF keeps the two rows of a rotated pair next to each other (0, D/2, 1, D/2 + 1, ...); Hugging
    Face rotates the first half of a head against the second (llama.cpp: LlamaModel.permute).

    Args:
        rows: [heads * head_dim, columns].
    """
    pairs = rows.reshape(-1, head_dim // 2, 2, rows.shape[-1])
    return pairs.swapaxes(1, 2).reshape(rows.shape)
