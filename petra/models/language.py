"""Language models: reversible ones, and the ordinary transformer of the same shapes.

================  ===========================================================================================================
coupling          layer, with A the attention, M the MLP and f(x) = A(x) + M(x + A(x)) the change of x by an ordinary layer
================  ===========================================================================================================
two_functions     y1 = x1 + A(x2), y2 = x2 + M(y1) (Kitaev et al. 2020, "Reformer", section 3)
midpoint          y1 = x2, y2 = x1 + 2h·f(x2): two steps of the midpoint method (Gal et al. 2025, arXiv 2512.02056)
leapfrog          y1 = x1 + h²·f(x2), y2 = x2 + y1: x2 is the position and x1 the velocity of a leapfrog step (same paper)
================  ===========================================================================================================

All reversible layers between stem and head store nothing. ``midpoint`` and ``leapfrog`` have the parameters of the ordinary
transformer :func:`gpt`.

Weights are initialised as in GPT-2 (Radford et al. 2019, section 2.3). With a larger ``embedding_std`` than GPT-2's 0.02, PETRA's
gradients are more accurate: the first layers normalise the embedding, so the smaller it is, the more they amplify errors of its
reconstruction. Embedding and output layer don't share their weights, because stem and head belong to different stages, which
communicate with their neighbours only. Under autocast the embedding and the streams stay in float32; only the branches compute
in the lower precision.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Annotated

import torch
from torch import Tensor, nn

from petra.errors import Count, Positive, Share, alternatives, require
from petra.model import Model
from petra.models.attention import DEVIATION, MLP, Attention, LayerOptions, linear
from petra.reversible import Coupling, ReversibleBlock, TwoFunctionCoupling
from petra.specs import Streams

COUPLINGS, POSITIONS = ("two_functions", "midpoint", "leapfrog"), ("learned", "rotary")


class TokenStem(nn.Module):
    """Token embedding, plus a position embedding if positions are learned. Maps int64 tokens (B, T) to streams.

    Args:
        classes: Number of different tokens.
        size: Largest T.
        dim: Size D of a token's vector.
        dropout: Dropout probability of the embedding.
        learned: Whether to add a learned position embedding.
        copies: Number of streams (B, T, D), all equal to the embedding.
        rest: Whether the first stream starts at zero (the velocity of ``leapfrog``).
        delimiter: Token with which a document begins. With it, the last stream (B, T) is 1 where a document begins and 0
            elsewhere.
        std: Standard deviation of the initial embeddings.

    Attributes:
        first: Position of the first token, greater than 0 only while text is generated.

    Raises:
        ValueError: In ``forward``, if T exceeds ``size``.
    """

    def __init__(
        self,
        classes: int,
        size: int,
        dim: int,
        dropout: float,
        *,
        learned: bool = True,
        copies: int = 2,
        rest: bool = False,
        delimiter: Annotated[int | None, ">= 0"] = None,
        std: float = DEVIATION,
    ) -> None:
        super().__init__()
        self.size, self.copies, self.rest, self.delimiter = size, copies, rest, delimiter
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
        streams = (torch.zeros_like(x), x) if self.rest else (x,) * self.copies
        return streams if self.delimiter is None else (*streams, (tokens == self.delimiter).to(x.dtype))


class Layer(nn.Module):
    """What an ordinary layer adds to its input: f(x) = A(x) + M(x + A(x)), times ``scale``. Maps (B, T, D) to (B, T, D)."""

    def __init__(self, options: LayerOptions, scale: float = 1.0) -> None:
        super().__init__()
        self.scale = scale
        self.attention, self.mlp = Attention(options), MLP(options)

    def forward(self, x: Tensor, *context: Tensor) -> Tensor:
        attended = self.attention(x, *context)
        f: Tensor = attended + self.mlp(x + attended)
        return f if self.scale == 1 else f * self.scale


class ResidualLayer(nn.Module):
    """Layer of an ordinary transformer: x + f(x)."""

    def __init__(self, options: LayerOptions) -> None:
        super().__init__()
        self.f = Layer(options)

    def forward(self, x: Tensor, *context: Tensor) -> Streams:
        return x + self.f(x, *context), *context


class Velocity(nn.Module):
    """Identity. As the second function of a coupling, it adds the velocity to the position."""

    def forward(self, x: Tensor, *context: Tensor) -> Tensor:
        return x


class LanguageHead(nn.Module):
    """Normalisation and a linear layer to logits (B·T, classes), one row per position.

    Args:
        options: Form of the layers.
        classes: Number of different tokens.
        joint: Whether to read the first two streams, next to each other. Otherwise read the second of two streams, or the only
            one.
        streams: Number of streams without context.
    """

    def __init__(self, options: LayerOptions, classes: int, *, joint: bool, streams: int) -> None:
        super().__init__()
        self.joint, self.streams = joint, streams
        width = (2 if joint else 1) * options.dim
        self.norm = options.make_norm(width)
        self.linear = linear(width, classes, options.bias)

    def forward(self, *streams: Tensor) -> Tensor:
        x = torch.cat(streams[:2], dim=2) if self.joint else streams[self.streams - 1]
        logits: Tensor = self.linear(self.norm(x).flatten(0, 1))
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
    mlp: str = "gelu",
    norm: str = "layernorm",
    bias: bool = True,
    positions: str = "learned",
    qk_norm: bool = False,
    delimiter: Annotated[int | None, ">= 0"] = None,
    embedding_std: Positive = DEVIATION,
    coupling: str = "two_functions",
    step: Positive = 1.0,
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
        coupling: Kind of the reversible layers, see the table of this module.
        step: Step size h of ``midpoint`` and ``leapfrog``.

    Raises:
        ConfigError: If an argument is out of range.
    """
    require(coupling in COUPLINGS, "model.coupling", alternatives(COUPLINGS), coupling)
    fits = 0 < step < math.inf and (step == 1 or coupling != "two_functions")
    require(fits, "model.step", "a number > 0; 1 for two_functions", step)
    options = LayerOptions(dim, heads, kv_heads, hidden, mlp, norm, bias, positions == "rotary", qk_norm, dropout, depth=depth)
    stem = _stem(options, classes, size, positions, delimiter, embedding_std, 2, coupling == "leapfrog")
    head = partial(LanguageHead, options, classes, joint=coupling == "two_functions", streams=2)
    return options.model("revgpt", stem, partial(_coupled, options, coupling, step), head)


def gpt(
    classes: int = 256,
    dim: Count = 384,
    depth: Count = 6,
    heads: Count = 6,
    dropout: Share = 0.0,
    size: int = 256,
    kv_heads: Count | None = None,
    hidden: Count | None = None,
    mlp: str = "gelu",
    norm: str = "layernorm",
    bias: bool = True,
    positions: str = "learned",
    qk_norm: bool = False,
    delimiter: Annotated[int | None, ">= 0"] = None,
    embedding_std: Positive = DEVIATION,
) -> Model:
    """Build the ordinary transformer of the same shapes as :func:`revgpt`, whose layers are not reversible.

    Arguments, input and output are those of :func:`revgpt`.

    Raises:
        ConfigError: If an argument is out of range.
    """
    options = LayerOptions(dim, heads, kv_heads, hidden, mlp, norm, bias, positions == "rotary", qk_norm, dropout, depth=depth)
    stem = _stem(options, classes, size, positions, delimiter, embedding_std, 1, False)
    head = partial(LanguageHead, options, classes, joint=False, streams=1)
    return options.model("gpt", stem, partial(ResidualLayer, options), head)


def _stem(
    options: LayerOptions, classes: int, size: int, positions: str, delimiter: int | None, std: float, copies: int, rest: bool
) -> Callable[[], nn.Module]:
    """Check the arguments of a language model's stem, and return its builder."""
    require(size >= 1, "model.size", "an integer >= 1", size)
    require(classes >= 1, "model.classes", "an integer >= 1", classes)
    require(positions in POSITIONS, "model.positions", alternatives(POSITIONS), positions)
    within = delimiter is None or 0 <= delimiter < classes
    require(within, "model.delimiter", f"null or a token from 0 to {classes - 1}", delimiter)
    require(0 < std < math.inf, "model.embedding_std", "a number > 0", std)
    learned, dropout = positions == "learned", options.dropout
    kind = partial(TokenStem, learned=learned, copies=copies, rest=rest, delimiter=delimiter, std=std)
    return partial(kind, classes, size, options.dim, dropout)


def _coupled(options: LayerOptions, coupling: str, step: float) -> ReversibleBlock:
    if coupling == "two_functions":
        return TwoFunctionCoupling(Attention(options), MLP(options))
    if coupling == "midpoint":
        return Coupling(Layer(options, 2 * step))
    return TwoFunctionCoupling(Layer(options, step**2), Velocity())
