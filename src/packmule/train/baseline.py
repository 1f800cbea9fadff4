"""What a training child takes before it holds anything of a model: libraries loaded and warm.

`packmule.probe.torch_child` loads this module by name, in a fresh process.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from packmule.shapes import bodies
from packmule.shapes.layout import TensorSpec, layout
from packmule.shapes.model import ModelShape
from packmule.spec.batch import Batch
from packmule.train.memory import heap_bytes, process_memory, trim_malloc, tune_caches, tune_malloc

if TYPE_CHECKING:
    from packmule.kernels.contract import Kernels

_SIZES = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 256,
    "max_position_embeddings": 64,
}


def peak_bytes(threads: int) -> int:
    """VmRSS in bytes once every body of a tiny layer has run, in float32 and in bfloat16, less the
    matrix products compiled for bfloat16, which the planner counts by itself.

    Set up as a training child is, so call it before torch is imported.
    """
    tune_malloc()
    tune_caches(bodies.PRIMITIVES_KEPT)
    import torch

    import packmule.train.loop  # noqa: F401
    from packmule.kernels import load

    torch.set_grad_enabled(False)
    torch.set_num_threads(threads)
    kernels = load(threads)
    _run_layer(kernels, "fp32")
    before = heap_bytes()
    _run_layer(kernels, "bf16-mixed")
    compiled = heap_bytes() - before
    trim_malloc()
    return process_memory().resident - compiled


def _run_layer(kernels: Kernels, precision: str) -> None:
    """Forward and backward of one layer and the head over one short document."""
    import numpy as np
    import torch

    from packmule.models.context import Decoder, TokenBatch
    from packmule.models.decoder import head_loss, layer_backward, layer_forward
    from packmule.models.views import views

    shape = ModelShape.from_config({"model_type": "llama", **_SIZES}, "baseline")
    types, tokens = bodies.DTYPES[precision], shape.max_positions
    decoder = Decoder.create(kernels, shape, types, tokens)
    ids = np.zeros(tokens, np.int64)
    batch = TokenBatch.from_batch(Batch(ids, ids, np.arange(tokens, dtype=np.int32), (tokens,)))

    def tensors(specs: tuple[TensorSpec, ...]) -> dict[str, torch.Tensor]:
        place = layout(specs)
        return views(torch.zeros(place.bytes, dtype=torch.uint8), place)

    stream = bodies.input_spec(shape, tokens, types)
    x, dx = tensors((stream,))["x"], tensors((stream,))["x"]
    _, block, head = shape.blocks()
    layer = shape.layer(1)
    weights, grads = tensors(block.specs(types.compute)), tensors(block.specs(types.gradient))
    saved = tensors(bodies.layer_saved(layer, tokens, types))
    scratch = tensors(bodies.layer_backward_scratch(layer, tokens, types))
    layer_forward(decoder, layer, weights, batch, x, saved, scratch, dx)
    layer_backward(decoder, layer, weights, batch, x, saved, scratch, dx, dx, grads, True, False)
    weights, grads = tensors(head.specs(types.compute)), tensors(head.specs(types.gradient))
    scratch = tensors(bodies.head_scratch(shape, tokens, types, train=True))
    head_loss(decoder, weights, batch, x, 1.0, tokens, dx, grads, scratch, True)
