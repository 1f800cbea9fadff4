"""Weights reach the run's state one piece of one tensor at a time, from any kind of file, unmapped."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tests.unit.weights.test_source import prepared, write_gguf

from packmule.data.manifest import folder_manifest, gguf_manifest, random_manifest
from packmule.models.weights.export import write_huggingface
from packmule.models.weights.names import hf_name
from packmule.models.weights.source import WeightSource
from packmule.shapes.model import ModelShape

CONFIG = {
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": 512,
    "intermediate_size": 8192,
    "num_hidden_layers": 1,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}
LARGEST = 4 * 512 * 8192
"""Bytes of the largest tensor in float32; the model has three of them, and a little more."""

ROOT = Path(__file__).parents[2]
IMPORT = """
import json, sys, zlib
from pathlib import Path
from packmule.checkpoint.head import Progress
from packmule.checkpoint.layout import StateLayout
from packmule.checkpoint.store import StateStore
from packmule.models.weights.source import WeightSource
from packmule.shapes.model import ModelShape
from packmule.tiers.disk import PosixDisk
from packmule.train.transfer import import_weights
sys.path.append("tests/fault")
from known_run import progress

def status(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))

def look(done, total):
    mapped.update(name for name in files if name in Path("/proc/self/maps").read_text())

model, run, files, mapped = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[4:], set()
shape = ModelShape.from_config(json.loads(sys.argv[3]), "test")
layout = StateLayout.of(shape.blocks(), ("master", "m", "v"), "float32", 1 << 20)
store = StateStore(PosixDisk(), run, layout, zlib.crc32)
store.create_files()
with WeightSource.open(model) as source:
    source.check(shape)
    before = status("VmRSS:")
    import_weights(store, shape, source, progress(0), look)
print(json.dumps({"growth": status("VmHWM:") - before, "mapped": sorted(mapped)}))
"""


@pytest.mark.parametrize("form", ["gguf", "shards"])
def test_import_needs_less_than_its_largest_tensor(form: str, tmp_path: Path, seed: int) -> None:
    shape = ModelShape.from_config(CONFIG, "test")
    with WeightSource.open(prepared(tmp_path / "drawn", random_manifest({}, seed))) as drawn:
        if form == "gguf":
            weights = {
                hf_name(b, p): np.concatenate([c.copy() for _, c in drawn.chunks(b, p)]).reshape(p.shape)
                for b in shape.blocks()
                for p in b.parameters
            }
            write_gguf(tmp_path / "model.gguf", shape, weights, "Q8_0")
            manifest, files = gguf_manifest(tmp_path / "model.gguf"), ["model.gguf"]
        else:
            folder = tmp_path / "folder"
            chunks = lambda block, parameter: (c for _, c in drawn.chunks(block, parameter))  # noqa: E731
            write_huggingface(folder, shape, CONFIG, chunks, shard_bytes=LARGEST // 2)
            manifest, files = folder_manifest(folder), [path.name for path in folder.glob("*.safetensors")]
            assert len(files) > 3
    model = prepared(tmp_path / "m", manifest)
    command = [sys.executable, "-c", IMPORT, model, tmp_path / "run", json.dumps(CONFIG), *files]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    print(
        f"{form}: {found['growth'] / 1e6:.1f} MB above what was there, largest tensor {LARGEST / 1e6:.1f} MB"
    )
    # the share itself goes to disk; a whole tensor would be seen
    assert found["growth"] < LARGEST and not found["mapped"]
