"""Reversible transformers: a language model in the form of GPT-2 and a vision transformer.

A layer is one reversible block, y1 = x1 + attention(x2), y2 = x2 + MLP(y1), whose branches are normalised at their entry (Kitaev et
al. 2020, "Reformer", section 3; Mangalam et al. 2022, "Reversible vision transformers", section 3.2). Both streams begin as the
embedding, and the head reads both, so every layer between stem and head keeps its shape and needs no buffer.

Weights are drawn as in GPT-2 (Radford et al. 2019, "Language models are unsupervised multitask learners", section 2.3): normal with
deviation 0.02, that of a branch's last layer divided by √(number of branches). Embedding and output layer are separate weights:
stem and head belong to different stages, which talk only to their neighbours, so they can't share one matrix.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from petra.errors import ConfigError
from petra.model import BlockSpec, Model
from petra.reversible import TwoFunctionCoupling

DEEPEST = 10_000
"""Layers of a network."""
DEVIATION = 0.02


class Attention(nn.Module):
    """Normalisation, then self-attention with ``heads`` heads (Vaswani et al. 2017, section 3.2): (B, T, D) -> (B, T, D).

    Args:
        causal: a position sees itself and those before it, instead of all.
        deviation: of the output layer's weights.
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
    """Normalisation, then two layers with 4·D hidden units (Vaswani et al. 2017, section 3.3) and GELU: (B, T, D) -> (B, T, D)."""

    def __init__(self, dim: int, dropout: float, deviation: float) -> None:
        super().__init__(nn.LayerNorm(dim), _linear(dim, 4 * dim), nn.GELU(), _linear(4 * dim, dim, deviation), nn.Dropout(dropout))


class TokenStem(nn.Module):
    """Tokens int64 (B, T), T at most ``size``, as the sum of a learned vector for each token and one for each position.

    Returns it as both streams, (B, T, D) each.
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
            raise ValueError(f"found {length} tokens, accepted are at most {len(self.positions)}")
        x = self.dropout(self.tokens(tokens) + self.positions[:length])
        return x, x


class PatchStem(nn.Module):
    """Images (B, 3, ``size``, ``size``) as patches side by side, each mapped to D values, plus a learned vector for each position.

    Returns it as both streams, (B, (size / patch)², D) each.
    """

    def __init__(self, size: int, patch: int, dim: int, dropout: float) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, dim, patch, stride=patch, bias=False)  # the positions are biases
        self.positions = nn.Parameter(torch.empty((size // patch) ** 2, dim))
        self.dropout = nn.Dropout(dropout)
        for weight in self.parameters():
            nn.init.normal_(weight, std=DEVIATION)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        # Dense, since the next block must see the same memory layout here as when the streams arrive in a message.
        patches = self.patches(images).flatten(2).transpose(1, 2).contiguous()
        x = self.dropout(patches + self.positions)
        return x, x


class TransformerHead(nn.Module):
    """Normalises both streams (B, T, D) together and maps them to logits.

    They are (B·T, ``classes``), one row for each position; or, with ``pool``, (B, ``classes``) from the average over the positions.
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
    """A reversible language model as ``depth`` + 2 blocks: the stem, a reversible block for each layer, the head.

    Input tokens int64 (B, T) with values 0 … ``classes`` − 1 and T up to ``size``, output logits (B·T, ``classes``): row b·T + t is
    for the token that follows token t of text b. ``dropout`` acts on the embedding, the attention weights and the end of every
    branch.

    Raises :class:`petra.errors.ConfigError` for arguments out of range.
    """
    _require(size >= 1, "size", size, "whole numbers from 1 on")
    stem = partial(TokenStem, classes, size, dim, dropout)
    return _network("revgpt", stem, classes, dim, depth, heads, dropout, causal=True)


def revvit(
    classes: int = 10, patch: int = 4, dim: int = 192, depth: int = 12, heads: int = 3, dropout: float = 0.0, size: int = 32
) -> Model:
    """A reversible vision transformer as ``depth`` + 2 blocks: the stem, a reversible block for each layer, the head.

    Input (B, 3, ``size``, ``size``), output logits (B, ``classes``). A token is a square of ``patch`` pixels a side; there is no
    class token, the head averages over the positions. ``dropout`` acts as in :func:`revgpt`.

    Raises :class:`petra.errors.ConfigError` for arguments out of range.
    """
    _require(patch >= 1 and size % patch == 0, "patch", patch, f"divisors of {size}, the side of the images in pixels")
    stem = partial(PatchStem, size, patch, dim, dropout)
    return _network("revvit", stem, classes, dim, depth, heads, dropout, causal=False)


def _network(
    name: str, stem: Callable[[], nn.Module], classes: int, dim: int, depth: int, heads: int, dropout: float, *, causal: bool
) -> Model:
    for key, found in (("classes", classes), ("heads", heads)):
        _require(found >= 1, key, found, "whole numbers from 1 on")
    _require(1 <= depth <= DEEPEST, "depth", depth, f"whole numbers from 1 to {DEEPEST}")
    _require(dim >= 1 and dim % heads == 0, "dim", dim, f"multiples of model.heads, which is {heads}")
    _require(0 <= dropout < 1, "dropout", dropout, "numbers from 0 to below 1")
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


def _require(right: bool, key: str, found: float, accepted: str) -> None:
    if not right:
        raise ConfigError(f"model.{key}: found {found}, accepted are {accepted}")
