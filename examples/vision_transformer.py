"""A reversible vision transformer, by ``petra train model._target_=examples.vision_transformer.revvit data=digits``.

A layer is one reversible block, y1 = x1 + attention(x2) and y2 = x2 + MLP(y1). Each branch starts with a normalisation (Mangalam et
al. 2022, "Reversible vision transformers", section 3.2). Both streams start as the embedding, and the head reads both. All layers
between stem and head are therefore reversible. Weights are initialised as in :mod:`petra.models.language`.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from petra.errors import Count, Share, require
from petra.model import Model
from petra.models import RevViTLayer
from petra.models.attention import DEVIATION, LayerOptions, linear


class PatchStem(nn.Module):
    """Sum of patch and position embeddings, returned as both streams.

    Maps images (B, 3, size, size) to two streams (B, (size / patch)², D).

    Args:
        size: Side of an image in pixels.
        patch: Side of a patch in pixels.
        dim: Size D of a patch's vector.
        dropout: Dropout probability of the sum.
    """

    def __init__(self, size: int, patch: int, dim: int, dropout: float) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, dim, patch, stride=patch, bias=False)  # the position embeddings act as biases
        self.positions = nn.Parameter(torch.empty((size // patch) ** 2, dim))
        self.dropout = nn.Dropout(dropout)
        for weight in self.parameters():
            nn.init.normal_(weight, std=DEVIATION)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        # Dense, like streams received in a message. The next block thus gets the same memory layout in both cases.
        patches = self.patches(images).flatten(2).transpose(1, 2).contiguous()
        x = self.dropout(patches + self.positions)
        return x, x


class ImageHead(nn.Module):
    """Joint normalisation of both streams (B, T, D), and a linear layer from their mean over positions to logits (B, classes).

    Args:
        dim: Size D of a patch's vector.
        classes: Number of classes.
    """

    def __init__(self, dim: int, classes: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(2 * dim)
        self.linear = linear(2 * dim, classes)

    def forward(self, x1: Tensor, x2: Tensor) -> Tensor:
        logits: Tensor = self.linear(self.norm(torch.cat([x1, x2], dim=2)).mean(1))
        return logits


def revvit(
    classes: int = 10, patch: Count = 4, dim: Count = 192, depth: Count = 12, heads: Count = 3, dropout: Share = 0.0, size: int = 32
) -> Model:
    """Build a reversible vision transformer: ``depth`` + 2 blocks (stem, one reversible block per layer, head).

    There is no class token. The head averages over the patches.

    Input: images (B, 3, ``size``, ``size``). Output: logits (B, ``classes``).

    Args:
        classes: Number of classes.
        patch: Side of a patch in pixels, a divisor of ``size``.
        dim: Size of a patch's vector, a multiple of ``heads``.
        depth: Number of layers.
        heads: Number of attention heads.
        dropout: Dropout probability of the embedding, the attention weights and the output of every branch.
        size: Side of an image in pixels.

    Raises:
        ConfigError: If an argument is out of range.
    """
    divides = patch >= 1 and size % patch == 0
    require(divides, "model.patch", f"a divisor of {size}, the side of the images in pixels", patch)
    require(classes >= 1, "model.classes", "an integer >= 1", classes)
    options = LayerOptions(dim, heads, dropout=dropout, causal=False, depth=depth)
    stem, head = partial(PatchStem, size, patch, dim, dropout), partial(ImageHead, dim, classes)
    return options.model("revvit", stem, partial(RevViTLayer, dim, heads, depth=depth, dropout=dropout), head)
