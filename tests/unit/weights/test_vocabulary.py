"""A vocabulary in parts is read from whole files, and written to them, as if it were not cut."""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.exactness.runs import make_plan, progress
from tests.fault.recording_disk import RecordingDisk
from tests.unit.weights.test_source import (
    SHAPE,
    parameters,
    prepared,
    random_weights,
    read,
    save_folder,
    write_gguf,
)

from packmule.checkpoint.layout import StateLayout
from packmule.checkpoint.reader import StateReader
from packmule.checkpoint.store import StateStore
from packmule.data.manifest import folder_manifest, gguf_manifest, random_manifest
from packmule.errors import DataError
from packmule.models.weights.rows import vocabulary_rows
from packmule.models.weights.source import WeightSource
from packmule.shapes.model import ModelShape
from packmule.shapes.vocabulary import part_ranges
from packmule.train.transfer import RunSource, Source, exporter, import_weights

LARGE = replace(SHAPE, vocab=2500, variant=replace(SHAPE.variant, learned_positions=True, norm="layer"))
"""Its tables have several tiles of random numbers."""


def folder_of(kind: str, shape: ModelShape, folder: Path, seed: int) -> Path:
    """A prepared model folder."""
    if kind == "random":
        return prepared(folder, random_manifest({}, seed))
    weights = random_weights(shape, seed)
    if kind == "safetensors":
        save_folder(folder, weights, 1)
        return prepared(folder, folder_manifest(folder))
    folder.mkdir()
    write_gguf(folder / "m.gguf", shape, weights, kind)
    return prepared(folder, gguf_manifest(folder / "m.gguf"))


Whole = dict[tuple[str, str], np.ndarray]
"""Every tensor by its block's and its own name, where nothing is cut."""


def joined_chunks(source: WeightSource, shape: ModelShape, chunk_bytes: int) -> Whole:
    """Parts one below the other."""
    found: dict[tuple[str, str], list[np.ndarray]] = {}
    for block, parameter in parameters(shape):
        rows = read(source, block, parameter, chunk_bytes)
        found.setdefault((block.whole.name, parameter.name), []).append(rows)
    return {name: np.concatenate(rows) for name, rows in found.items()}


@pytest.mark.parametrize("kind", ("random", "safetensors", "F32", "Q8_0"))
@pytest.mark.parametrize("tied", (False, True))
def test_parts_are_the_rows_of_the_whole(kind: str, tied: bool, tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    shape = replace(LARGE if kind == "random" else SHAPE, tied=tied)
    with WeightSource.open(folder_of(kind, shape, tmp_path / "m", seed)) as source:
        cut = shape.cut(rng.choice((2, 3, 7, 50)))
        source.check(cut)
        expected = joined_chunks(source, shape, 1 << 20)
        for chunk_bytes in (1, 3000, 1 << 20):
            found = joined_chunks(source, cut, chunk_bytes)
            assert found.keys() == expected.keys()
            assert all(np.array_equal(found[name], expected[name]) for name in expected)


def test_a_part_of_a_smaller_vocabulary_is_refused(tmp_path: Path, seed: int) -> None:
    with WeightSource.open(folder_of("safetensors", SHAPE, tmp_path / "m", seed)) as source:
        cut = replace(SHAPE, vocab=SHAPE.vocab + 1).cut(4)
        with pytest.raises(DataError, match=r"'model.embed_tokens.weight' has shape \[96, 64\].*\[97, 64\]"):
            source.check(cut)


def imported(disk: RecordingDisk, folder: Path, shape: ModelShape, source: Source) -> None:
    """A run's step 0, its moments zero."""
    disk.make_folder(folder)
    layout = StateLayout.of(shape.blocks(), ("master", "m", "v"), "float32", 4096)
    store = StateStore(disk, folder, layout, zlib.crc32)
    store.create_files()
    import_weights(store, shape, source, progress(make_plan(), 0), lambda done, total: None)
    store.close()


def flat(chunks: Iterable[np.ndarray]) -> np.ndarray:
    """Each copied before the next may take its place."""
    return np.concatenate([chunk.copy() for chunk in chunks])


@pytest.mark.parametrize("tied", (False, True))
def test_a_run_is_exported_and_begun_from_whatever_its_cut(tied: bool, tmp_path: Path, seed: int) -> None:
    shape, disk = replace(LARGE, vocab=200, tied=tied), RecordingDisk()
    cuts = random.Random(seed).sample((1, 2, 3, 7, 50), 3)
    with WeightSource.open(folder_of("random", shape, tmp_path / "m", seed)) as source:
        expected = joined_chunks(source, shape, 1 << 20)
        imported(disk, Path("/run0"), shape.cut(cuts[0]), source)
    for index, cut in enumerate(cuts):
        with RunSource(StateReader.open(disk, Path(f"/run{index}"), zlib.crc32)) as run:
            for asked in (1, *cuts):
                run.check(shape.cut(asked))
                found = joined_chunks(run, shape.cut(asked), 4096)  # type: ignore[arg-type]
                assert all(np.array_equal(found[name], expected[name]) for name in expected), (cut, asked)
            with pytest.raises(DataError, match="does not hold the weights"):
                run.check(replace(shape, vocab=201).cut(3))
            if index + 1 < len(cuts):
                imported(disk, Path(f"/run{index + 1}"), shape.cut(cuts[index + 1]), run)
    # Whole parts may stay, or go.
    kept = np.flatnonzero(np.random.default_rng(seed).random(200) < np.repeat((0.9, 0.0, 1.0, 0.1), 50))
    with StateReader.open(disk, Path("/run2"), zlib.crc32) as reader:
        tensors = exporter(reader)
        pruned = vocabulary_rows(tensors, kept)
        for block, parameter in parameters(shape):
            whole = expected[block.name, parameter.name]
            assert np.array_equal(flat(tensors(block, parameter)), whole.reshape(-1))
            if block.kind != "layer" and parameter.name == "weight":
                whole = whole.reshape(parameter.shape)[kept]
            assert np.array_equal(flat(pruned(block, parameter)), whole.reshape(-1))


def test_ranges_of_parts_cover_the_vocabulary(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(50):
        vocab = rng.randint(1, 300)
        parts = rng.randint(1, vocab)
        ranges = part_ranges(vocab, parts)
        assert [token for part in ranges for token in part] == list(range(vocab))
        assert max(map(len, ranges)) - min(map(len, ranges)) <= 1
    for parts in (0, 5):
        with pytest.raises(ValueError, match="has no"):
            part_ranges(4, parts)
