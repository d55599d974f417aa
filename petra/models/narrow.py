"""Narrow streams: a branch of width D reads anchor[token] + U z from a stream z of s channels, and writes s channels.

Messages between stages then have s numbers for each stream and token, and the token's id, a side tensor. Everything else is
computed from these: a coupling of such branches is inverted exactly for any anchors and any U, and its gradient is complete. That
a fixed vector of each token leaves only a small subspace to be sent is an idea of "Protocol Models" (arXiv 2506.01260), where U is
the same everywhere and x itself is projected. Here each branch has a linear layer of its own as U.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Self
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from petra.models.attention import LayerOptions
from petra.quantization import hash_bits
from petra.specs import Streams

_ROWS = 1024
"""Tokens whose anchors are computed at a time."""


@dataclass(frozen=True)
class NarrowOptions:
    """Form of the layers of a network with narrow streams.

    Attributes:
        layers: Form of the branches. Its ``stream`` is the number s of channels.
        classes: Number of different tokens.
        seed: Seed of the anchors.
        std: Standard deviation of the anchors.
        delimiter: Token with which a document begins, or None.
    """

    layers: LayerOptions
    classes: int
    seed: int
    std: float
    delimiter: int | None


class Anchors(nn.Module):
    """A fixed vector for each token, from an integer hash of token and channel: uniform, and equal on all devices.

    One process has each table once, however many modules use it: modules with equal ``once_per_process`` share their buffers.

    Args:
        persistent: Whether state dictionaries contain the table. Loading another one is an error.
    """

    table: Tensor

    def __init__(self, form: NarrowOptions, *, persistent: bool = False) -> None:
        super().__init__()
        self.once_per_process: Hashable = form.classes, form.layers.dim, form.seed, form.std
        self._form = form
        found = _table(form, torch.get_default_device(), torch.get_default_dtype())
        self.register_buffer("table", found, persistent=persistent)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the anchors (B, T, D) of tokens (B, T)."""
        found: Tensor = F.embedding(tokens, self.table)
        return found

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if type(self.table) is Tensor:  # a fake tensor has no values
            self.table = _table(self._form, self.table.device, self.table.dtype)
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        given = state_dict.get(f"{prefix}table")
        if given is None or "table" in self._non_persistent_buffers_set:
            super()._load_from_state_dict(state_dict, prefix, *args)
        elif given.shape != self.table.shape or not torch.equal(given.to(self.table), self.table):
            args[-1].append(f"{prefix}table has those of another anchor_seed or embedding_std")


class Read(nn.Module):
    """What a branch reads: anchor[token] + U z, for a stream z (B, T, s) and tokens (B, T). Maps to (B, T, D)."""

    def __init__(self, form: NarrowOptions) -> None:
        super().__init__()
        dim, stream = form.layers.dim, form.layers.width
        self.anchors = Anchors(form)
        self.lift = nn.Linear(stream, dim, bias=False)  # a linear layer, so that Muon trains it
        nn.init.orthogonal_(self.lift.weight, (dim / stream) ** 0.5)  # keeps the deviation of an entry

    def forward(self, z: Tensor, tokens: Tensor) -> Tensor:
        found: Tensor = self.anchors(tokens) + self.lift(z)
        return found


class NarrowBranch(nn.Module):
    """A branch with its own reading of the stream.

    Args:
        branch: Class of the branch, which writes ``form.layers.stream`` channels.
    """

    def __init__(self, form: NarrowOptions, branch: type[nn.Module]) -> None:
        super().__init__()
        self.read, self.branch, self.delimiter = Read(form), branch(form.layers), form.delimiter

    def forward(self, z: Tensor, tokens: Tensor) -> Tensor:
        """Return what is added to a stream (B, T, s)."""
        y: Tensor = self.branch(self.read(z, tokens), *starts_of(tokens, self.delimiter))
        return y


class Widen(nn.Module):
    """Read narrow streams, and return as many streams of D channels, and the context of ordinary layers.

    Args:
        streams: Number of streams. The tokens follow.
    """

    def __init__(self, form: NarrowOptions, streams: int) -> None:
        super().__init__()
        self.reads, self.delimiter = nn.ModuleList(Read(form) for _ in range(streams)), form.delimiter

    def forward(self, *streams: Tensor) -> Streams:
        *narrow, tokens = streams
        wide = [read(z, tokens) for read, z in zip(self.reads, narrow, strict=True)]
        return *wide, *starts_of(tokens, self.delimiter)


def starts_of(tokens: Tensor, delimiter: int | None) -> Streams:
    """Return whether a document begins at each position, or nothing without a delimiter."""
    return () if delimiter is None else (tokens == delimiter,)


_TABLES: WeakValueDictionary[Hashable, Tensor] = WeakValueDictionary()


def _table(form: NarrowOptions, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return the anchors (classes, D) on a device. The table that this process has already is not computed again."""
    shape, key = (form.classes, form.layers.dim), (form.classes, form.layers.dim, form.seed, form.std, device, dtype)
    if device.type == "meta":
        return torch.empty(shape, dtype=dtype, device=device)
    if (found := _TABLES.get(key)) is None:
        with torch.device("cpu"):
            found, seed = torch.empty(shape), hash_bits(torch.tensor([form.seed & 0xFFFFFFFF]) ^ (form.seed >> 32))
            for tokens in torch.arange(shape[0]).split(_ROWS):  # type: ignore[no-untyped-call]
                bits = hash_bits(hash_bits(tokens[:, None] ^ seed) + torch.arange(shape[1]))
                found[tokens[0] : tokens[-1] + 1] = ((bits >> 8).float() * 2**-24 - 0.5) * (12**0.5 * form.std)
        found = _TABLES[key] = found.to(device, dtype)
    return found
