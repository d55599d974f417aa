"""Language models: a reversible one, and the ordinary transformer of the same shapes.

A reversible layer is y1 = x1 + A(x2), y2 = x2 + M(y1), with attention A and MLP M (Kitaev et al. 2020, "Reformer", section 3). All
layers between stem and head store nothing.

Weights are initialised as in GPT-2 (Radford et al. 2019, section 2.3), with ``embedding_std`` 0.02. The first layers normalise the
embedding, so the smaller it is, the more they amplify errors of its reconstruction. Embedding and output layer don't share their
weights, because stem and head belong to different stages, which communicate with their neighbours only. Under autocast the
embedding and the streams stay in float32; only the branches compute in the lower precision.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Annotated, Literal, get_args

import torch
from torch import Tensor, nn

from petra.errors import Count, Positive, Share, alternatives, require
from petra.model import Model
from petra.models.attention import DEVIATION, MLP, Attention, LayerOptions, linear
from petra.reversible import TwoFunctionCoupling
from petra.specs import Streams

POSITIONS = ("learned", "rotary")
HeadName = Literal["concat", "sum", "last", "norms"]


class TokenStem(nn.Module):
    """Token embedding, plus a position embedding if positions are learned. Maps int64 tokens (B, T) to streams.

    Args:
        classes: Number of different tokens.
        size: Largest T.
        dim: Size D of a token's vector.
        dropout: Dropout probability of the embedding.
        learned: Whether to add a learned position embedding.
        copies: Number of streams (B, T, D), all equal to the embedding.
        delimiter: Token with which a document begins. With it, the last stream (B, T) is 1 where a document begins and 0
            elsewhere.
        std: Standard deviation of the initial embeddings.

    Attributes:
        first: Position of the first token, greater than 0 only while text is generated.

    Raises:
        ValueError: In ``forward``, if T exceeds ``size``.
    """

    def __init__(
        self, classes: int, size: int, dim: int, dropout: float, *, learned: bool, copies: int, delimiter: int | None, std: float
    ) -> None:
        super().__init__()
        self.size, self.copies, self.delimiter = size, copies, delimiter
        self.tokens = nn.Embedding(classes, dim)
        self.positions = nn.Parameter(torch.empty(size, dim)) if learned else None
        self.dropout = nn.Dropout(dropout)
        self.first = 0
        for weight in self.parameters():
            nn.init.normal_(weight, std=std)

    def forward(self, tokens: Tensor) -> Streams:
        last = self.first + tokens.shape[1]
        if last > self.size:
            raise ValueError(f"expected at most {self.size} tokens, got {last}")
        x = self.tokens(tokens)
        if self.positions is not None:
            x = x + self.positions[self.first : last]
        x = self.dropout(x)
        streams = (x,) * self.copies
        return streams if self.delimiter is None else (*streams, (tokens == self.delimiter).to(x.dtype))


class Layer(nn.Module):
    """What an ordinary layer adds to its input: f(x) = A(x) + M(x + A(x)). Maps (B, T, D) to (B, T, D)."""

    def __init__(self, options: LayerOptions) -> None:
        super().__init__()
        self.attention, self.mlp = Attention(options), MLP(options)

    def forward(self, x: Tensor, *context: Tensor) -> Tensor:
        attended = self.attention(x, *context)
        f: Tensor = attended + self.mlp(x + attended)
        return f


class ResidualLayer(nn.Module):
    """Layer of an ordinary transformer: x + f(x)."""

    def __init__(self, options: LayerOptions) -> None:
        super().__init__()
        self.f = Layer(options)

    def forward(self, x: Tensor, *context: Tensor) -> Streams:
        return x + self.f(x, *context), *context


class LanguageHead(nn.Module):
    """Normalisation and a linear layer to logits (B·T, classes), one row per position.

    Args:
        options: Form of the layers.
        classes: Number of different tokens.
        streams: Number of streams. A context may follow.
        reads: What it reads of several streams, as ``head`` of :func:`revgpt`.
    """

    def __init__(self, options: LayerOptions, classes: int, streams: int, reads: HeadName = "concat") -> None:
        super().__init__()
        self.streams, self.reads = streams, reads
        width = options.dim * (streams if reads == "concat" else 1)
        if reads == "norms":
            self.norms = nn.ModuleList(options.make_norm(width) for _ in range(streams))
        else:
            self.norm = options.make_norm(width)
        self.linear = linear(width, classes, options.bias)

    def forward(self, *streams: Tensor) -> Tensor:
        own = streams[: self.streams]
        if self.reads == "norms":
            x = sum(norm(stream) for norm, stream in zip(self.norms, own, strict=True))
        elif self.reads == "sum":
            x = self.norm(sum(own))
        else:
            x = self.norm(own[-1] if self.reads == "last" or self.streams == 1 else torch.cat(own, dim=2))
        logits: Tensor = self.linear(x.flatten(0, 1))
        return logits


def revgpt(
    classes: int = 256,
    dim: Count = 384,
    depth: Count = 6,
    heads: Count = 6,
    dropout: Share = 0.0,
    size: int = 256,
    kv_heads: Count | None = None,
    hidden: Count | None = None,
    mlp: Literal["gelu", "swiglu"] = "gelu",
    norm: Literal["layernorm", "rmsnorm"] = "layernorm",
    bias: bool = True,
    positions: str = "learned",
    qk_norm: bool = False,
    delimiter: Annotated[int | None, ">= 0"] = None,
    embedding_std: Positive = DEVIATION,
    head: HeadName = "concat",
) -> Model:
    """Build a reversible language model: ``depth`` + 2 blocks (stem, one reversible block per layer, head).

    Input: int64 tokens (B, T) with values 0 ... ``classes`` − 1. Output: logits (B·T, ``classes``). Row b·T + t predicts the token
    that follows token t of text b.

    Args:
        classes: Number of different tokens.
        dim, depth, heads, kv_heads, hidden, mlp, norm, bias, qk_norm: Form of the layers, see
            :class:`petra.models.attention.LayerOptions`.
        dropout: Dropout probability of the embedding, the attention weights and the output of every branch.
        size: Largest T.
        positions: ``learned`` (added to the embedding) or ``rotary``.
        delimiter: Token with which every document begins. Positions then attend to their own document only. None: a text is one
            document.
        embedding_std: Standard deviation of the initial embeddings of tokens and positions.
        head: What the head reads: both streams next to each other (``concat``), their ``sum``, the ``last`` one alone, or the sum
            of both after a normalisation of each (``norms``).

    Raises:
        ConfigError: If an argument is out of range.
    """
    require(head in get_args(HeadName), "model.head", alternatives(get_args(HeadName)), head)
    options = LayerOptions(dim, heads, kv_heads, hidden, mlp, norm, bias, positions == "rotary", qk_norm, dropout, depth=depth)
    stem = _stem(options, classes, size, positions, delimiter, embedding_std, 2)
    return options.model("revgpt", stem, partial(_coupled, options), partial(LanguageHead, options, classes, 2, head))


def gpt(
    classes: int = 256,
    dim: Count = 384,
    depth: Count = 6,
    heads: Count = 6,
    dropout: Share = 0.0,
    size: int = 256,
    kv_heads: Count | None = None,
    hidden: Count | None = None,
    mlp: Literal["gelu", "swiglu"] = "gelu",
    norm: Literal["layernorm", "rmsnorm"] = "layernorm",
    bias: bool = True,
    positions: str = "learned",
    qk_norm: bool = False,
    delimiter: Annotated[int | None, ">= 0"] = None,
    embedding_std: Positive = DEVIATION,
) -> Model:
    """Build the ordinary transformer of the same shapes as :func:`revgpt`, whose layers are not reversible.

    Arguments, input and output are those of :func:`revgpt`; there is one stream.

    Raises:
        ConfigError: If an argument is out of range.
    """
    options = LayerOptions(dim, heads, kv_heads, hidden, mlp, norm, bias, positions == "rotary", qk_norm, dropout, depth=depth)
    stem = _stem(options, classes, size, positions, delimiter, embedding_std, 1)
    return options.model("gpt", stem, partial(ResidualLayer, options), partial(LanguageHead, options, classes, 1))


def _stem(
    options: LayerOptions, classes: int, size: int, positions: str, delimiter: int | None, std: float, copies: int
) -> Callable[[], nn.Module]:
    """Check the arguments of a language model's stem, and return its builder."""
    require(size >= 1, "model.size", "an integer >= 1", size)
    require(classes >= 1, "model.classes", "an integer >= 1", classes)
    require(positions in POSITIONS, "model.positions", alternatives(POSITIONS), positions)
    within = delimiter is None or 0 <= delimiter < classes
    require(within, "model.delimiter", f"null or a token from 0 to {classes - 1}", delimiter)
    require(0 < std < math.inf, "model.embedding_std", "a number > 0", std)
    kind = partial(TokenStem, learned=positions == "learned", copies=copies, delimiter=delimiter, std=std)
    return partial(kind, classes, size, options.dim, options.dropout)


def _coupled(options: LayerOptions) -> TwoFunctionCoupling:
    return TwoFunctionCoupling(Attention(options), MLP(options))
