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
from dataclasses import replace
from functools import partial
from typing import Annotated, Literal, get_args

import torch
from torch import Tensor, nn

from petra.errors import Count, Positive, Share, alternatives, require
from petra.model import BlockSpec, Model
from petra.models.attention import DEVIATION, MLP, Attention, LayerOptions, linear
from petra.models.narrow import Anchors, NarrowBranch, NarrowOptions, Widen, starts_of
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
        delimiter: Token with which a document begins. With it, a side tensor (B, T) follows the streams, which tells where
            documents begin.
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
        return *streams, *starts_of(tokens, self.delimiter)


class NarrowStem(TokenStem):
    """A :class:`TokenStem` whose streams have few channels. The tokens follow them as int32, a side tensor.

    Its state dictionary has the anchors of the network, for programs that don't compute them.
    """

    def __init__(self, form: NarrowOptions, size: int, dropout: float, *, learned: bool, copies: int, std: float) -> None:
        super().__init__(form.classes, size, form.layers.width, dropout, learned=learned, copies=copies, delimiter=None, std=std)
        self.anchors = Anchors(form, persistent=True)

    def forward(self, tokens: Tensor) -> Streams:
        return *super().forward(tokens), tokens.int()


class Layer(nn.Module):
    """What an ordinary layer adds to its input: f(x) = A(x) + M(x + A(x)). Maps a stream to its own shape."""

    def __init__(self, attention: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        self.attention, self.mlp = attention, mlp

    def forward(self, x: Tensor, *context: Tensor) -> Tensor:
        attended = self.attention(x, *context)
        f: Tensor = attended + self.mlp(x + attended, *context)
        return f


class ResidualLayer(nn.Module):
    """Layer of an ordinary transformer: x + f(x)."""

    def __init__(self, attention: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        self.f = Layer(attention, mlp)

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


class NarrowHead(nn.Module):
    """Head of narrow streams: reads each of them, and is then like :class:`LanguageHead`."""

    def __init__(self, form: NarrowOptions, streams: int, reads: HeadName = "concat") -> None:
        super().__init__()
        self.streams = 1 if reads == "last" else streams
        self.widen, self.head = Widen(form, self.streams), LanguageHead(form.layers, form.classes, self.streams, reads)

    def forward(self, *streams: Tensor) -> Tensor:
        logits: Tensor = self.head(*self.widen(*streams[-self.streams - 1 :]))
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
    stream: Count | None = None,
    anchor_seed: Annotated[int, ">= 0"] = 0,
    wide_layers: Annotated[int, ">= 0"] = 0,
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
        stream: Channels s of each stream, which each branch then reads beside an anchor of the token
            (:mod:`petra.models.narrow`): messages between stages have s numbers instead of ``dim``, and the token's id. None: the
            streams have ``dim`` channels.
        anchor_seed: Seed of the anchors, whose deviation is half of ``embedding_std``.
        wide_layers: Number of layers, the last of ``depth``, whose streams have ``dim`` channels. A block ``widen`` precedes them;
            messages are narrow if the last stage begins with it or before.

    Raises:
        ConfigError: If an argument is out of range.
    """
    require(head in get_args(HeadName), "model.head", alternatives(get_args(HeadName)), head)
    options = LayerOptions(dim, heads, kv_heads, hidden, mlp, norm, bias, positions == "rotary", qk_norm, dropout, depth=depth)
    narrow = _narrow(options, classes, stream, anchor_seed, wide_layers, delimiter, embedding_std)
    stem = _stem(options, narrow, classes, size, positions, delimiter, embedding_std, 2)
    return _model("revgpt", options, narrow, wide_layers, stem, TwoFunctionCoupling, classes, 2, head)


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
    stream: Count | None = None,
    anchor_seed: Annotated[int, ">= 0"] = 0,
    wide_layers: Annotated[int, ">= 0"] = 0,
) -> Model:
    """Build the ordinary transformer of the same shapes as :func:`revgpt`, whose layers are not reversible.

    Arguments, input and output are those of :func:`revgpt`; there is one stream.

    Raises:
        ConfigError: If an argument is out of range.
    """
    options = LayerOptions(dim, heads, kv_heads, hidden, mlp, norm, bias, positions == "rotary", qk_norm, dropout, depth=depth)
    narrow = _narrow(options, classes, stream, anchor_seed, wide_layers, delimiter, embedding_std)
    stem = _stem(options, narrow, classes, size, positions, delimiter, embedding_std, 1)
    return _model("gpt", options, narrow, wide_layers, stem, ResidualLayer, classes, 1)


def _narrow(
    options: LayerOptions,
    classes: int,
    stream: int | None,
    anchor_seed: int,
    wide_layers: int,
    delimiter: int | None,
    embedding_std: float,
) -> NarrowOptions | None:
    """Check the arguments of narrow streams, and return the form of their layers; None without narrow streams."""
    require(anchor_seed >= 0, "model.anchor_seed", "an integer >= 0", anchor_seed)
    if stream is None:
        require(anchor_seed == 0, "model.anchor_seed", "0 without model.stream", anchor_seed)
        require(wide_layers == 0, "model.wide_layers", "0 without model.stream", wide_layers)
        return None
    require(1 <= stream <= options.dim, "model.stream", f"null or an integer from 1 to {options.dim} (model.dim)", stream)
    depth = options.depth
    require(0 <= wide_layers <= depth, "model.wide_layers", f"an integer from 0 to {depth} (model.depth)", wide_layers)
    return NarrowOptions(replace(options, stream=stream), classes, anchor_seed, embedding_std / 2, delimiter)


def _stem(
    options: LayerOptions,
    narrow: NarrowOptions | None,
    classes: int,
    size: int,
    positions: str,
    delimiter: int | None,
    std: float,
    copies: int,
) -> Callable[[], nn.Module]:
    """Check the arguments of a language model's stem, and return its builder."""
    require(size >= 1, "model.size", "an integer >= 1", size)
    require(classes >= 1, "model.classes", "an integer >= 1", classes)
    require(positions in POSITIONS, "model.positions", alternatives(POSITIONS), positions)
    within = delimiter is None or 0 <= delimiter < classes
    require(within, "model.delimiter", f"null or a token from 0 to {classes - 1}", delimiter)
    require(0 < std < math.inf, "model.embedding_std", "a number > 0", std)
    learned = positions == "learned"
    if narrow is not None:
        return partial(NarrowStem, narrow, size, options.dropout, learned=learned, copies=copies, std=std)
    kind = partial(TokenStem, learned=learned, copies=copies, delimiter=delimiter, std=std)
    return partial(kind, classes, size, options.dim, options.dropout)


def _model(
    name: str,
    options: LayerOptions,
    narrow: NarrowOptions | None,
    wide_layers: int,
    stem: Callable[[], nn.Module],
    couple: Callable[[nn.Module, nn.Module], nn.Module],
    classes: int,
    streams: int,
    reads: HeadName = "concat",
) -> Model:
    """Return a model of stem, layers, each a coupling of attention and MLP, and head."""
    wide = partial(_layer, options, couple)
    head: Callable[[], nn.Module] = partial(LanguageHead, options, classes, streams, reads)
    if narrow is None:
        return options.model(name, stem, wide, head)
    first_wide = options.depth - wide_layers
    kinds = [partial(_narrow_layer, narrow, couple)] * first_wide + [wide] * wide_layers
    blocks = [BlockSpec(f"layer{i}", kind) for i, kind in enumerate(kinds)]
    if wide_layers:
        blocks.insert(first_wide, BlockSpec("widen", partial(Widen, narrow, streams)))
    else:
        head = partial(NarrowHead, narrow, streams, reads)
    return Model(name, (BlockSpec("stem", stem), *blocks, BlockSpec("head", head)))


def _layer(options: LayerOptions, couple: Callable[[nn.Module, nn.Module], nn.Module]) -> nn.Module:
    return couple(Attention(options), MLP(options))


def _narrow_layer(narrow: NarrowOptions, couple: Callable[[nn.Module, nn.Module], nn.Module]) -> nn.Module:
    return couple(NarrowBranch(narrow, Attention), NarrowBranch(narrow, MLP))
