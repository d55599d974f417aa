"""Tensors that blocks and stages exchange, and the shape and type that both sides agree on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated

import torch
from torch import Tensor

from petra.errors import ModelError, check_types, invalid, require
from petra.message_formats import MESSAGE_FORMATS

Streams = tuple[Tensor, ...]
"""Input or output of a block: one tensor, or the pair (x1, x2) of a reversible network, and then any side tensors.

A *side tensor* is one of integers or booleans, such as token ids, which blocks and the loss read. It has no gradient, and travels
forward only, in its own type: no format of messages changes it. ``t.view(torch.int32)`` of float32 numbers is one, too.
"""

REPORT = 2
"""Position of the report in a backward message."""
Message = tuple[Streams, ...]
"""What one stage sends to another for a microbatch.

``(x,)`` in the forward direction, ``(x̃, δ, (report,))`` in the backward direction. x̃ is empty if the receiving stage does not
reconstruct its input.
"""
IGNORED = -100
"""Target of a padding row. The default ``ignore_index`` of ``torch.nn.functional.cross_entropy``."""


@dataclass(frozen=True)
class TensorSpec:
    """Shape and type of one tensor that blocks or stages exchange.

    Attributes:
        shape: Size of each dimension.
        dtype: Type of the elements.
        channels_last: Whether the tensor uses the channels-last memory format.
        message_format: Name of the format in which the tensor travels between stages, or None for ``dtype``.

    Raises:
        ConfigError: If the shape has other entries than integers >= 0, or ``dtype`` is no type of torch.
    """

    shape: Annotated[tuple[int, ...], ">= 0"]
    dtype: torch.dtype
    channels_last: bool = False
    message_format: str | None = None

    def __post_init__(self) -> None:
        require(isinstance(self.dtype, torch.dtype), "dtype", "a type of torch, such as torch.float32", repr(self.dtype))
        check_types(self)

    @property
    def bytes(self) -> int:
        """Size of the tensor in bytes, in ``dtype``."""
        return self.dtype.itemsize * torch.Size(self.shape).numel()

    @cached_property
    def packed(self) -> tuple[TensorSpec, ...]:
        """Specs of what travels between stages: the tensor itself, or its elements and factors in a format."""
        if self.message_format is None:
            return (self,)
        found = MESSAGE_FORMATS[self.message_format]
        elements = TensorSpec(self.shape, getattr(torch, found.dtype), self.channels_last)
        return (elements, TensorSpec((found.factors,), torch.float32)) if found.factors else (elements,)

    @property
    def message_bytes(self) -> int:
        """Size in bytes of what travels between stages."""
        return sum(part.bytes for part in self.packed)

    def pack(self, tensor: Tensor) -> Sequence[Tensor]:
        """Return what travels for a tensor."""
        if self.message_format is None:
            return (tensor,)
        return [
            part.to(spec.dtype) for part, spec in zip(MESSAGE_FORMATS[self.message_format].pack(tensor), self.packed, strict=True)
        ]

    def unpack(self, parts: Sequence[Tensor]) -> Tensor:
        """Return the tensor from what has arrived."""
        return parts[0] if self.message_format is None else MESSAGE_FORMATS[self.message_format].unpack(parts, self.dtype)

    def require(self, tensor: Tensor, what: str) -> None:
        """Check that a tensor has this shape and type.

        Args:
            tensor: The tensor to check.
            what: Name of the tensor in the error message.

        Raises:
            ModelError: If the shape or the type differs.
        """
        if tuple(tensor.shape) != self.shape or tensor.dtype != self.dtype:
            raise invalid(what, str(self), TensorSpec(tuple(tensor.shape), tensor.dtype), ModelError)

    def __str__(self) -> str:
        form = "" if self.message_format is None else f" as {self.message_format}"
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}{form}"


MessageSpec = tuple[tuple[TensorSpec, ...], ...]
"""Specs of the tensors of a :data:`Message`, in the same nesting."""


def as_streams(value: Tensor | Sequence[Tensor]) -> Streams:
    """Return the output of a block as a tuple of tensors."""
    return (value,) if isinstance(value, Tensor) else tuple(value)


def is_side(tensor: Tensor | TensorSpec) -> bool:
    """Return whether a tensor among the inputs or outputs of blocks is a side tensor."""
    return not tensor.dtype.is_floating_point


def side_tensors(streams: Streams) -> Streams:
    """Return the side tensors among streams."""
    return tuple([t for t in streams if not t.dtype.is_floating_point])


def without_side(streams: Streams) -> Streams:
    """Return the streams without side tensors, as they are in backward messages."""
    return tuple([t for t in streams if t.dtype.is_floating_point])


def are_integers(targets: Tensor) -> bool:
    """Return whether targets are integers or booleans. Those of signed types may be :data:`IGNORED`."""
    return not (targets.is_floating_point() or targets.is_complex())


def in_own_memory(tensor: Tensor) -> Tensor:
    """Return the tensor, copied if it is a view: a view of a received message would keep the whole message alive."""
    return tensor.clone() if tensor.untyped_storage().nbytes() > tensor.nbytes else tensor


def detached(streams: Streams) -> Streams:
    """Return the tensors detached from their autograd graph."""
    return tuple([t.detach() for t in streams])
