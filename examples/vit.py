"""A small Vision Transformer (Dosovitskiy et al. 2021, arXiv:2010.11929) on handwritten digits, as a model of
one's own:

    pip install --no-deps scikit-learn
    packmule train examples/vit.yaml --ram 500MB

`model` and `digits` are what the job names. Nothing here knows of Packmule.
"""

from __future__ import annotations

from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

SIZE, PATCH, CLASSES = 8, 2, 10


class Embed(nn.Module):
    """Patches to vectors, a class token before them, and positions. [B, 1, SIZE, SIZE] -> [B, T, H]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        patches = (SIZE // PATCH) ** 2
        self.patches = nn.Conv2d(1, width, PATCH, PATCH)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(0.02 * torch.randn(1, patches + 1, width))

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        images, _ = batch
        x = self.patches(images).flatten(2).transpose(1, 2)
        return torch.cat((self.token.expand(len(x), -1, -1), x), 1) + self.positions


class Block(nn.Module):
    """Attention and a feed-forward half, each behind a norm. [B, T, H] -> [B, T, H]."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, nn.Dropout(dropout)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = x + self.dropout(self.out(mixed))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))


class Head(nn.Module):
    """The class token's logits: one loss per image, and whether it is named right."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.logits = nn.LayerNorm(width), nn.Linear(width, CLASSES)

    def forward(self, x: Tensor, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        _, labels = batch
        logits = self.logits(self.norm(x[:, 0])).float()
        right = logits.argmax(-1) == labels
        return F.cross_entropy(logits, labels, reduction="none"), {"accuracy": right}


def model(width: int = 64, depth: int = 4, heads: int = 4, dropout: float = 0.1) -> SimpleNamespace:
    """The three parts. Blocks are made one at a time, so that even the load stays within the budget."""
    return SimpleNamespace(
        embed=partial(Embed, width),
        blocks=[partial(Block, width, heads, dropout) for _ in range(depth)],
        head=partial(Head, width),
    )


class Digits:
    """Images of 8 by 8 pixels and what they show: the UCI digits that scikit-learn's package holds.

    Args:
        shift: pixels that an image is moved at most, at random.
    """

    def __init__(self, shift: int) -> None:
        spec = find_spec("sklearn")  # its files only; nothing of it is imported
        if spec is None or spec.origin is None:
            raise ModuleNotFoundError("the digits are in scikit-learn: pip install --no-deps scikit-learn")
        path = Path(spec.origin).parent / "datasets" / "data" / "digits.csv.gz"
        table = np.loadtxt(path, delimiter=",", dtype=np.uint8)
        self.images, self.labels, self.shift = table[:, :-1].reshape(-1, SIZE, SIZE), table[:, -1], shift

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        down, right = np.random.randint(-self.shift, self.shift + 1, 2)
        image = np.roll(self.images[index], (down, right), (0, 1))
        return image[None].astype(np.float32) / 16 - 0.3, int(self.labels[index])


def digits(shift: int = 0) -> Digits:
    """All 1,797 images."""
    return Digits(shift)
