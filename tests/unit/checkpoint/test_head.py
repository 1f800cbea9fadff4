"""HEAD.json: any changed or missing byte is found; other versions are named."""

from __future__ import annotations

import json
import zlib
from pathlib import Path

import numpy as np
import pytest
from known_run import LAYOUT, progress

from packmule.checkpoint.head import BlockHead, Head, Progress, decode, encode, seal
from packmule.errors import ConfigError, DamagedFile
from packmule.kernels.crc import crc32c
from packmule.tiers.disk import Checksum

PATH = Path("run/HEAD.json")


def example(checksum: Checksum = crc32c, step: int = 3) -> Head:
    kept = {name: getattr(progress(step), name) for name in Progress.model_fields}
    blocks = tuple(
        BlockHead(slot=block % 2, checksums=("0123abcd" * LAYOUT.pieces(block),) * len(LAYOUT.planes))
        for block in range(len(LAYOUT.blocks))
    )
    return seal(Head(**kept, layout=LAYOUT.record(), blocks=blocks), checksum)


def resealed(text: str, **changes: object) -> bytes:
    """The file with other values and a checksum that fits them."""
    data = json.loads(text)
    del data["checksum"]
    data |= changes | {"checksum": "00000000"}
    raw = (json.dumps(data, indent=2) + "\n").encode()
    return raw.replace(b'"checksum": "00000000"', b'"checksum": "%08x"' % crc32c(raw))


def test_what_is_written_is_read() -> None:
    head = example()
    found = decode(encode(head), PATH, crc32c)
    assert found == head
    assert encode(found) == encode(head)


def test_every_flipped_bit_is_found(seed: int) -> None:
    data = encode(example(zlib.crc32))
    bits = np.random.default_rng(seed).integers(0, 8, len(data))
    for place, bit in enumerate(bits):
        damaged = bytearray(data)
        damaged[place] ^= 1 << int(bit)
        with pytest.raises(DamagedFile, match=r"run/HEAD\.json"):
            decode(bytes(damaged), PATH, zlib.crc32)


def test_every_truncation_is_found() -> None:
    data = encode(example(zlib.crc32))
    for kept in range(len(data)):
        with pytest.raises(DamagedFile, match=r"run/HEAD\.json"):
            decode(data[:kept], PATH, zlib.crc32)


def test_garbage_is_damage_not_a_traceback(seed: int) -> None:
    rng = np.random.default_rng(seed)
    for size in (0, 1, 26, 4096):
        with pytest.raises(DamagedFile):
            decode(rng.bytes(size), PATH, crc32c)


def test_an_unknown_version_names_file_and_version() -> None:
    data = resealed(example().to_json(), format=2, novelty=1)
    with pytest.raises(ConfigError, match=r"run/HEAD.json: format 2 is not known.*reads format 1"):
        decode(data, PATH, crc32c)


def test_an_unknown_key_names_file_and_key() -> None:
    with pytest.raises(ConfigError, match=r"run/HEAD.json: unknown key `cursors`") as caught:
        decode(resealed(example().to_json(), cursors=1), PATH, crc32c)
    assert "cursor" in caught.value.hint


@pytest.mark.parametrize("blocks", [[], [{"slot": 0, "checksums": []}] * 3])
def test_blocks_that_do_not_fit_the_layout_are_refused(blocks: list[object]) -> None:
    with pytest.raises(ConfigError, match=r"run/HEAD.json: `blocks` does not fit"):
        decode(resealed(example().to_json(), blocks=blocks), PATH, crc32c)


def test_a_slot_that_does_not_exist_is_refused() -> None:
    head = example(zlib.crc32)
    layout = LAYOUT.with_slots(1).record()
    with pytest.raises(ConfigError, match="does not fit `layout`"):
        decode(encode(seal(head.model_copy(update={"layout": layout}), crc32c)), PATH, crc32c)
