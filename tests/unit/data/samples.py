"""Texts and GGUF files that the data and weight tests share."""

from __future__ import annotations

import random

import gguf
import numpy as np

CORPUS = [
    "The cat sat on the mat, and the dog didn't care.\n\nIt's 1999, we'll see 20 30 things;  they're here.",
    "def area(width, height):\n    return width * height  # naïve café\n\n\tthe end\r\nthe theatre then",
    "Once upon a time there was a little mule who carried a large model through the mountains.",
]
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
PARTS = [
    "the", "The", " cat", "  ", "\n", "\n\n", "\r\n", "\t", "1", "23", " 4567", "²", "½", "'s", "'LL",
    "don't", "naïve", "日本語", "☕", "👩\u200d👧", ".", "...", " (", "==", "<|im_start|>", "<|im_end|>",
    "\x00",    " ", "e", "mule", "\u00a0",
]  # fmt: skip


def random_text(rng: random.Random, parts: int) -> str:
    """Words, numbers, marks, special tokens and white space in any order."""
    return "".join(rng.choice(PARTS) for _ in range(parts))


def write_header(writer: gguf.GGUFWriter, vocab: int) -> None:
    """A one-layer llama of hidden size 8 with zero weights."""
    writer.add_context_length(64)
    writer.add_embedding_length(8)
    writer.add_block_count(1)
    writer.add_feed_forward_length(8)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    shapes = {"token_embd": (vocab, 8), "output_norm": (8,)}
    layer = {"attn_norm": (8,), "attn_q": (8, 8), "attn_k": (4, 8), "attn_v": (4, 8), "attn_output": (8, 8)}
    layer |= {"ffn_norm": (8,), "ffn_gate": (8, 8), "ffn_up": (8, 8), "ffn_down": (8, 8)}
    shapes |= {f"blk.0.{name}": shape for name, shape in layer.items()}
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", np.zeros(shape, np.float32))


def close(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
