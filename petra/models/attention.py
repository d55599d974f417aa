"""Branches of transformer layers: self-attention and MLP, each with a normalisation before it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from petra.errors import Count, Share, check_types, require
from petra.model import BlockSpec, Model

DEVIATION = 0.02
"""Standard deviation of initial weights (Radford et al. 2019, section 2.3)."""
ROTARY_BASE = 10_000.0
"""Base of the wavelengths of rotary position embeddings (Su et al. 2021, section 3.2.2)."""
MAX_DEPTH = 10_000
"""Largest accepted number of layers."""


@dataclass(frozen=True)
class LayerOptions:
    """Form of a transformer layer.

    Attributes:
        dim: Size D of a token's vector, a multiple of ``heads``.
        heads: Number of query heads.
        kv_heads: Number of key and value heads, a divisor of ``heads``; each serves several query heads (grouped-query attention,
            Ainslie et al. 2023). None: as many as query heads.
        hidden: Hidden units of the MLP. None: 4·D for ``gelu``; 8/3·D, rounded up to a multiple of 64, for ``swiglu``.
        mlp: ``gelu`` (Vaswani et al. 2017, section 3.3, with GELU) or ``swiglu`` (Shazeer 2020, Eq. 6).
        norm: ``layernorm`` or ``rmsnorm`` (Zhang and Sennrich 2019).
        bias: Whether linear layers and layer normalisations have biases.
        rotary: Whether queries and keys are rotated by their position (Su et al. 2021).
        qk_norm: Whether each head's queries and keys are normalised by RMSNorm before the rotation (Dehghani et al. 2023).
        dropout: Dropout probability of attention weights and of each branch's output.
        causal: Whether a position attends only to itself and earlier positions.
        depth: Number of layers. The last weights of each branch are initialised with a deviation divided by √(2·depth).
        stream: Channels that each branch writes (:mod:`petra.models.narrow`). None: D.

    Raises:
        ConfigError: If a value is out of range.
    """

    dim: int
    heads: Count = 1
    kv_heads: int | None = None
    hidden: Count | None = None
    mlp: Literal["gelu", "swiglu"] = "gelu"
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    bias: bool = True
    rotary: bool = False
    qk_norm: bool = False
    dropout: Share = 0.0
    causal: bool = True
    depth: int = 1
    stream: Count | None = None

    def __post_init__(self) -> None:
        check_types(self, "model.")
        require(self.dim >= 1 and self.dim % self.heads == 0, "model.dim", f"a multiple of {self.heads} (model.heads)", self.dim)
        kv = self.kv_heads
        divides = kv is None or (kv >= 1 and self.heads % kv == 0)
        require(divides, "model.kv_heads", f"null or a divisor of {self.heads} (model.heads)", kv)
        even = not self.rotary or self.head_dim % 2 == 0
        require(even, "model.dim", "an even number of channels per head with model.positions=rotary", self.dim)
        require(1 <= self.depth <= MAX_DEPTH, "model.depth", f"an integer from 1 to {MAX_DEPTH}", self.depth)

    @property
    def head_dim(self) -> int:
        """Channels of a head."""
        return self.dim // self.heads

    @property
    def width(self) -> int:
        """Channels of a stream."""
        return self.stream or self.dim

    @property
    def output_deviation(self) -> float:
        """Standard deviation of the initial weights of each branch's last layer."""
        deviation: float = DEVIATION / (2 * self.depth) ** 0.5
        return deviation

    def make_norm(self, channels: int) -> nn.Module:
        """Return the normalisation of vectors with ``channels`` entries."""
        return nn.RMSNorm(channels) if self.norm == "rmsnorm" else nn.LayerNorm(channels, bias=self.bias)

    def model(
        self, name: str, stem: Callable[[], nn.Module], layer: Callable[[], nn.Module], head: Callable[[], nn.Module]
    ) -> Model:
        """Return a model of a stem, :attr:`depth` layers and a head."""
        layers = (BlockSpec(f"layer{i}", layer) for i in range(self.depth))
        return Model(name, (BlockSpec("stem", stem), *layers, BlockSpec("head", head)))


class KeyValueCache:
    """Keys and values of all tokens so far, for the generation of text.

    Attributes:
        keys: (B, key heads, T, channels), or None before the first token.
        values: As ``keys``.
        starts: 1 where a document begins and 0 elsewhere (B, T), or None if all tokens are one document.
    """

    def __init__(self) -> None:
        self.keys: Tensor | None = None
        self.values: Tensor | None = None
        self.starts: Tensor | None = None

    @property
    def length(self) -> int:
        """Number of tokens."""
        return 0 if self.keys is None else self.keys.shape[2]

    def extend(self, keys: Tensor, values: Tensor, starts: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """Append the keys, values and starts of new tokens, and return those of all tokens."""
        self.keys = keys if self.keys is None else torch.cat([self.keys, keys], 2)
        self.values = values if self.values is None else torch.cat([self.values, values], 2)
        self.starts = starts if self.starts is None or starts is None else torch.cat([self.starts, starts], 1)
        return self.keys, self.values, self.starts


class HeadNorm(nn.RMSNorm):
    """RMSNorm of queries or keys. Under autocast they are bf16, and torch's fused kernel needs weights of the same type."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalised heads, in the type of ``x``."""
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


class Attention(nn.Module):
    """Normalisation and self-attention (Vaswani et al. 2017, section 3.2). Maps (B, T, D) to (B, T, D).

    Attributes:
        cache: Cache for the generation of text, or None. With a cache, the input is the tokens after those in the cache.
    """

    def __init__(self, options: LayerOptions) -> None:
        super().__init__()
        self.options = options
        self.kv_heads = options.kv_heads or options.heads
        self.norm = options.make_norm(options.dim)
        self.qkv = linear(options.dim, (options.heads + 2 * self.kv_heads) * options.head_dim, options.bias)
        self.out = linear(options.dim, options.width, options.bias, options.output_deviation)
        if options.qk_norm:
            self.q_norm, self.k_norm = HeadNorm(options.head_dim), HeadNorm(options.head_dim)
        self.dropout = nn.Dropout(options.dropout)
        self.cache: KeyValueCache | None = None

    def forward(self, x: Tensor, starts: Tensor | None = None) -> Tensor:
        """Return the attention's output.

        Args:
            x: Tokens' vectors (B, T, D).
            starts: 1 where a document begins and 0 elsewhere (B, T). Positions attend to their own document only. None: the whole
                row is one document.
        """
        options = self.options
        heads = self.qkv(self.norm(x)).unflatten(2, (-1, options.head_dim)).transpose(1, 2)
        kv = heads.shape[1] * self.kv_heads // (options.heads + 2 * self.kv_heads)  # processes may divide the heads
        q, k, v = heads.split([heads.shape[1] - 2 * kv, kv, kv], dim=1)
        if options.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        before = 0 if self.cache is None else self.cache.length
        if options.rotary:
            cos, sin = rotation(q, before)
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        mask = None
        if self.cache is not None:
            k, v, starts = self.cache.extend(k, v, starts)
        if starts is not None:
            mask = same_document(starts, options.causal, before)
        elif before:
            mask = x.new_ones(x.shape[1], before + x.shape[1], dtype=torch.bool).tril(before)
        mixed = F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            dropout_p=options.dropout if self.training else 0.0,
            is_causal=options.causal and mask is None,
            enable_gqa=self.kv_heads < options.heads,
        )
        y: Tensor = self.dropout(self.out(mixed.transpose(1, 2).flatten(2)))
        return y

    def divisible(self, tp: int) -> dict[str, tuple[int, ...] | str]:
        """Return how ``tp`` processes divide the heads, in the words of ``petra/engine/options/tensor_parallel.py``.

        Raises:
            ConfigError: If they can't.
        """
        options = self.options
        require(self.kv_heads % tp == 0, "tp", f"a divisor of {self.kv_heads}, the number of key and value heads", tp)
        norms = dict.fromkeys(["q_norm", "k_norm"] if options.qk_norm else [], "replicated_with_grad_allreduce")
        sizes = tuple(heads * options.head_dim for heads in (options.heads, self.kv_heads, self.kv_heads))
        return {"qkv": sizes, "out": "rowwise", **norms}


class MLP(nn.Module):
    """Normalisation and MLP. Maps (B, T, D) to (B, T, D)."""

    def __init__(self, options: LayerOptions) -> None:
        super().__init__()
        self.gated = options.mlp == "swiglu"
        default = -(-8 * options.dim // (3 * 64)) * 64 if self.gated else 4 * options.dim
        hidden = options.hidden or default
        self.norm = options.make_norm(options.dim)
        self.up = linear(options.dim, (2 if self.gated else 1) * hidden, options.bias)
        self.down = linear(hidden, options.width, options.bias, options.output_deviation)
        self.dropout = nn.Dropout(options.dropout)

    def forward(self, x: Tensor, starts: Tensor | None = None) -> Tensor:
        """Return the MLP's output. ``starts`` is not used."""
        h = self.up(self.norm(x))
        if self.gated:
            gate, h = h.chunk(2, dim=-1)
            h = F.silu(gate) * h
        else:
            h = F.gelu(h)
        y: Tensor = self.dropout(self.down(h))
        return y

    def divisible(self, tp: int) -> dict[str, tuple[int, ...] | str]:
        """Return how ``tp`` processes divide the hidden units (see :meth:`Attention.divisible`)."""
        return {"up": (self.down.in_features,) * (2 if self.gated else 1), "down": "rowwise"}


def linear(in_features: int, out_features: int, bias: bool = True, deviation: float = DEVIATION) -> nn.Linear:
    """Return a linear layer with normally distributed weights and biases of zero."""
    layer = nn.Linear(in_features, out_features, bias)
    nn.init.normal_(layer.weight, std=deviation)
    if bias:
        nn.init.zeros_(layer.bias)
    return layer


def rotation(x: Tensor, first: int) -> tuple[Tensor, Tensor]:
    """Return cosine and sine of the angles by which :func:`rotate` rotates, (T, C / 2) each.

    Args:
        x: Queries or keys (B, heads, T, C), with an even C.
        first: Position of the first token.
    """
    length, channels = x.shape[2:]
    frequencies = ROTARY_BASE ** (-torch.arange(0, channels, 2, device=x.device, dtype=torch.float32) / channels)
    positions = torch.arange(first, first + length, device=x.device, dtype=torch.float32)
    angles = torch.outer(positions, frequencies)
    return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs of channels by angles that grow with the position (Su et al. 2021, Eq. 15).

    Channel i is paired with channel i + C/2. The product of a rotated query and a rotated key depends only on the distance of
    their positions.

    Args:
        x: Queries or keys (B, heads, T, C).
        cos, sin: See :func:`rotation`.
    """
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)


def same_document(starts: Tensor, causal: bool, first: int = 0) -> Tensor:
    """Return the mask of attention within documents: true (B, 1, T - first, T) where position i may attend to position j.

    Args:
        starts: 1 where a document begins and 0 elsewhere (B, T).
        causal: Whether i attends only to j <= i.
        first: The first position i.
    """
    documents = starts.float().cumsum(1)
    mask = documents[:, first:, None] == documents[:, None, :]
    return (mask.tril(first) if causal else mask)[:, None]
