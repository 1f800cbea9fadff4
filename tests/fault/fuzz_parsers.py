"""Coverage-guided fuzzing of the parsers of weight files and of a run's records, with atheris.

    python tests/fault/fuzz_parsers.py -max_total_time=600      any libFuzzer flag

The first byte of an input chooses the parser, the rest is the file. Only a PackmuleError may come out; a hang
(20 s) or more than 1 GiB ends the run with the input written to crash-* or oom-*. Where atheris is not
installed nothing is done, and says so: the drawn cases of test_malformed_*.py do not need it.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

try:
    import atheris
except ImportError:
    print("skipped: atheris is not installed (pip install atheris)")
    sys.exit(0)

with atheris.instrument_imports(include=["packmule"]):
    from packmule.checkpoint.head import decode
    from packmule.data.gguf import read_gguf
    from packmule.data.gguf_config import gguf_config
    from packmule.data.gguf_tokenizer import tokenizer_from_gguf
    from packmule.data.manifest import Manifest, folder_manifest, gguf_manifest
    from packmule.data.store import TokenStore
    from packmule.errors import PackmuleError

FOLDER = Path(tempfile.mkdtemp(prefix="packmule-fuzz-"))
LIMITS = ("-rss_limit_mb=1024", "-timeout=20", "-max_len=4096")


def _gguf(path: Path) -> None:
    gguf_config(read_gguf(path))
    gguf_manifest(path)
    tokenizer_from_gguf(path)


PARSERS: tuple[tuple[str, Callable[[Path], object]], ...] = (
    ("model.gguf", _gguf),
    ("model.safetensors", lambda path: folder_manifest(path.parent)),
    ("model.safetensors.index.json", lambda path: folder_manifest(path.parent)),
    ("weights.json", lambda path: Manifest.open(path.parent)),
    ("HEAD.json", lambda path: decode(path.read_bytes(), path, lambda data: 0)),
    ("meta.json", lambda path: TokenStore(path.parent)),
)


def one_input(data: bytes) -> None:
    """One file through one parser."""
    name, parse = PARSERS[data[0] % len(PARSERS) if data else 0]
    folder = FOLDER / name.replace(".", "_")
    folder.mkdir(exist_ok=True)
    (folder / name).write_bytes(data[1:])
    with suppress(PackmuleError):
        parse(folder / name)


def seeds(folder: Path) -> None:
    """Beginnings of each kind of file."""
    folder.mkdir()
    head = b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
    beginnings = (
        b"GGUF" + (3).to_bytes(4, "little") + bytes(16),
        len(head).to_bytes(8, "little") + head + bytes(4),
        b'{"weight_map":{"a":"a.safetensors"}}',
        b'{"kind":"random"}',
        b'{"format": 1,\n  "checksum": "00000000"\n}\n',
        b'{"format":1,"key":"","dtype":"<u2","vocab":9}',
    )
    for index, data in enumerate(beginnings):
        (folder / str(index)).write_bytes(bytes([index]) + data)


if __name__ == "__main__":
    seeds(FOLDER / "corpus")
    atheris.Setup([sys.argv[0], *LIMITS, *sys.argv[1:], str(FOLDER / "corpus")], one_input)
    atheris.Fuzz()
