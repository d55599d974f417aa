"""Reversible transformers: a language model like GPT-2 and a vision transformer.

A layer is one reversible block, y1 = x1 + attention(x2) and y2 = x2 + MLP(y1). Each branch starts with a normalisation (Kitaev et
al. 2020, "Reformer", section 3; Mangalam et al. 2022, "Reversible vision transformers", section 3.2). Both streams start as the
embedding, and the head reads both. All layers between stem and head are therefore reversible.

Weights are initialised as in GPT-2 (Radford et al. 2019, "Language models are unsupervised multitask learners", section 2.3):
normal with standard deviation 0.02, divided by √(number of branches) in the last layer of each branch. Embedding and output layer
don't share their weights, because stem and head belong to different stages, which communicate with their neighbours only.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from petra.errors import require
from petra.model import BlockSpec, Model
from petra.reversible import TwoFunctionCoupling

MAX_DEPTH = 10_000
"""Largest accepted number of layers."""
DEVIATION = 0.02
"""Standard deviation of initial weights."""


class Attention(nn.Module):
    """Normalisation and multi-head self-attention (Vaswani et al. 2017, section 3.2). Maps (B, T, D) to (B, T, D).

    Args:
        dim: Size D of a token's vector.
        heads: Number of heads.
        dropout: Dropout probability of attention weights and output.
        causal: Whether a position attends only to itself and earlier positions.
        deviation: Standard deviation of the output layer's initial weights.
    """

    def __init__(self, dim: int, heads: int, dropout: float, causal: bool, deviation: float) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.norm = nn.LayerNorm(dim)
        self.qkv = _linear(dim, 3 * dim)
        self.out = _linear(dim, dim, deviation)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        dropout = self.dropout.p if self.training else 0.0
        heads = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=self.causal)
        y: Tensor = self.dropout(self.out(heads.transpose(1, 2).flatten(2)))
        return y


class MLP(nn.Sequential):
    """Normalisation and two linear layers with 4·D hidden units and GELU (Vaswani et al. 2017, section 3.3).

    Maps (B, T, D) to (B, T, D).

    Args:
        dim: Size D of a token's vector.
        dropout: Dropout probability of the output.
        deviation: Standard deviation of the second layer's initial weights.
    """

    def __init__(self, dim: int, dropout: float, deviation: float) -> None:
        super().__init__(nn.LayerNorm(dim), _linear(dim, 4 * dim), nn.GELU(), _linear(4 * dim, dim, deviation), nn.Dropout(dropout))


class TokenStem(nn.Module):
    """Sum of token and position embeddings, returned as both streams. Maps int64 tokens (B, T) to two streams (B, T, D).

    Args:
        classes: Number of different tokens.
        size: Largest T.
        dim: Size D of a token's vector.
        dropout: Dropout probability of the sum.

    Raises:
        ValueError: In ``forward``, if T exceeds ``size``.
    """

    def __init__(self, classes: int, size: int, dim: int, dropout: float) -> None:
        super().__init__()
        self.tokens = nn.Embedding(classes, dim)
        self.positions = nn.Parameter(torch.empty(size, dim))
        self.dropout = nn.Dropout(dropout)
        for weight in self.parameters():
            nn.init.normal_(weight, std=DEVIATION)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        length = tokens.shape[1]
        if length > len(self.positions):
            raise ValueError(f"expected at most {len(self.positions)} tokens, got {length}")
        x = self.dropout(self.tokens(tokens) + self.positions[:length])
        return x, x


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


class TransformerHead(nn.Module):
    """Joint normalisation of both streams (B, T, D), and a linear layer to logits.

    Args:
        dim: Size D of a token's vector.
        classes: Number of classes.
        pool: Whether to average over positions, which gives logits (B, classes). Otherwise logits are (B·T, classes), one row per
            position.
    """

    def __init__(self, dim: int, classes: int, pool: bool) -> None:
        super().__init__()
        self.pool = pool
        self.norm = nn.LayerNorm(2 * dim)
        self.linear = _linear(2 * dim, classes)

    def forward(self, x1: Tensor, x2: Tensor) -> Tensor:
        x = self.norm(torch.cat([x1, x2], dim=2))
        logits: Tensor = self.linear(x.mean(1) if self.pool else x.flatten(0, 1))
        return logits


def revgpt(classes: int = 256, dim: int = 384, depth: int = 6, heads: int = 6, dropout: float = 0.0, size: int = 256) -> Model:
    """Build a reversible language model: ``depth`` + 2 blocks (stem, one reversible block per layer, head).

    Input: int64 tokens (B, T) with values 0 ... ``classes`` − 1. Output: logits (B·T, ``classes``). Row b·T + t predicts the token
    that follows token t of text b.

    Args:
        classes: Number of different tokens.
        dim: Size of a token's vector, a multiple of ``heads``.
        depth: Number of layers.
        heads: Number of attention heads.
        dropout: Dropout probability of the embedding, the attention weights and the output of every branch.
        size: Largest T.

    Raises:
        ConfigError: If an argument is out of range.
    """
    require(size >= 1, "model.size", "an integer >= 1", size)
    stem = partial(TokenStem, classes, size, dim, dropout)
    return _network("revgpt", stem, classes, dim, depth, heads, dropout, causal=True)


def revvit(
    classes: int = 10, patch: int = 4, dim: int = 192, depth: int = 12, heads: int = 3, dropout: float = 0.0, size: int = 32
) -> Model:
    """Build a reversible vision transformer: ``depth`` + 2 blocks (stem, one reversible block per layer, head).

    There is no class token. The head averages over the patches.

    Input: images (B, 3, ``size``, ``size``). Output: logits (B, ``classes``).

    Args:
        classes: Number of classes.
        patch: Side of a patch in pixels, a divisor of ``size``.
        dim, depth, heads, dropout: As for :func:`revgpt`.
        size: Side of an image in pixels.

    Raises:
        ConfigError: If an argument is out of range.
    """
    divides = patch >= 1 and size % patch == 0
    require(divides, "model.patch", f"a divisor of {size}, the side of the images in pixels", patch)
    stem = partial(PatchStem, size, patch, dim, dropout)
    return _network("revvit", stem, classes, dim, depth, heads, dropout, causal=False)


def _network(
    name: str, stem: Callable[[], nn.Module], classes: int, dim: int, depth: int, heads: int, dropout: float, *, causal: bool
) -> Model:
    require(classes >= 1, "model.classes", "an integer >= 1", classes)
    require(heads >= 1, "model.heads", "an integer >= 1", heads)
    require(1 <= depth <= MAX_DEPTH, "model.depth", f"an integer from 1 to {MAX_DEPTH}", depth)
    require(dim >= 1 and dim % heads == 0, "model.dim", f"a multiple of {heads} (model.heads)", dim)
    require(0 <= dropout < 1, "model.dropout", "a number >= 0 and < 1", dropout)
    layer = partial(_layer, dim, heads, dropout, causal, DEVIATION / (2 * depth) ** 0.5)
    layers = tuple(BlockSpec(f"layer{i}", layer) for i in range(depth))
    head = partial(TransformerHead, dim, classes, pool=not causal)
    return Model(name, (BlockSpec("stem", stem), *layers, BlockSpec("head", head)))


def _layer(dim: int, heads: int, dropout: float, causal: bool, deviation: float) -> TwoFunctionCoupling:
    return TwoFunctionCoupling(Attention(dim, heads, dropout, causal, deviation), MLP(dim, dropout, deviation))


def _linear(in_features: int, out_features: int, deviation: float = DEVIATION) -> nn.Linear:
    layer = nn.Linear(in_features, out_features)
    nn.init.normal_(layer.weight, std=deviation)
    nn.init.zeros_(layer.bias)
    return layer
