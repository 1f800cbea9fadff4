"""A process set up as a training child runs layers over ever new document lengths.

Run as `python child_growth.py PRECISION KEPT LENGTHS`; prints the bytes by which it grew, at most,
over a warm process that holds the buffers already, and those that it has mapped for compiled code.
"""

from __future__ import annotations

import json
import sys

import numpy as np

from packmule.shapes import bodies
from packmule.shapes.layout import TensorSpec, layout
from packmule.shapes.model import ModelShape
from packmule.spec.batch import Batch
from packmule.train import baseline
from packmule.train.memory import mapped_code_bytes, process_memory

TOKENS = 512
SHAPE = ModelShape(
    vocab=512, hidden=256, layers=1, heads=4, kv_heads=2, head_dim=64, ffn=704,
    norm_eps=1e-5, rope_theta=1e4, tied=False, max_positions=TOKENS,
)  # fmt: skip


def main(precision: str, kept: int, lengths: int) -> tuple[int, int]:
    bodies.PRIMITIVES_KEPT = kept
    baseline.peak_bytes(2)
    import torch

    from packmule.kernels import load
    from packmule.models import decoder as bodies_of
    from packmule.models.context import Decoder, TokenBatch
    from packmule.models.views import views

    types = bodies.DTYPES[precision]
    decoder = Decoder.create(load(2), SHAPE, types, TOKENS)

    def tensors(specs: tuple[TensorSpec, ...]) -> dict[str, torch.Tensor]:
        place = layout(specs)
        return views(torch.full((place.bytes,), 0, dtype=torch.uint8), place)

    block, layer = SHAPE.blocks()[1], SHAPE.layer(1)
    weights, grads = tensors(block.specs(types.compute)), tensors(block.specs(types.gradient))
    stream = (bodies.input_spec(SHAPE, TOKENS, types),)
    x, y = tensors(stream)["x"], tensors(stream)["x"]
    saved = tensors(bodies.layer_saved(layer, TOKENS, types))
    scratch = tensors(bodies.layer_backward_scratch(layer, TOKENS, types))
    before = most = process_memory().resident
    code = 0
    for number in range(lengths):
        # One document that almost fills the rows, and one of what is left: both lengths are new.
        documents = (TOKENS // 2 + 3 * number, TOKENS // 2 - 4 * number)
        ids = np.zeros(sum(documents), np.int64)
        positions = np.concatenate([np.arange(n, dtype=np.int32) for n in documents])
        batch = TokenBatch.from_batch(Batch(ids, ids, positions, documents))
        bodies_of.layer_forward(decoder, layer, weights, batch, x, saved, scratch, y)
        bodies_of.layer_backward(decoder, layer, weights, batch, x, saved, scratch, y, y, grads, True, True)
        most, code = max(most, process_memory().resident), max(code, mapped_code_bytes())
    return most - before, code


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))))
