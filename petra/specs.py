"""Tensors that blocks and stages exchange, and the shape and type that both sides agree on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from petra.errors import ModelError, check_types, invalid, require

Streams = tuple[Tensor, ...]
"""Input or output of a block: one tensor, or the pair (x1, x2) of a reversible network."""

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
        wire: Type in which the tensor travels between stages, or None for ``dtype``.

    Raises:
        ConfigError: If the shape has other entries than integers >= 0, or ``dtype`` or ``wire`` is no type of torch.
    """

    shape: Annotated[tuple[int, ...], ">= 0"]
    dtype: torch.dtype
    channels_last: bool = False
    wire: torch.dtype | None = None

    def __post_init__(self) -> None:
        require(isinstance(self.dtype, torch.dtype), "dtype", "a type of torch, such as torch.float32", repr(self.dtype))
        require(self.wire is None or isinstance(self.wire, torch.dtype), "wire", "None or a type of torch", repr(self.wire))
        check_types(self)

    @property
    def bytes(self) -> int:
        """Size of the tensor in bytes, in ``dtype``."""
        return self.dtype.itemsize * torch.Size(self.shape).numel()

    @property
    def wire_dtype(self) -> torch.dtype:
        """Type in which the tensor travels between stages."""
        return self.wire or self.dtype

    @property
    def wire_bytes(self) -> int:
        """Size of the tensor in bytes, in ``wire_dtype``."""
        return self.wire_dtype.itemsize * torch.Size(self.shape).numel()

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
        wire = "" if self.wire is None else f" as {_name(self.wire)}"
        return f"{_name(self.dtype)}{list(self.shape)}{wire}"


MessageSpec = tuple[tuple[TensorSpec, ...], ...]
"""Specs of the tensors of a :data:`Message`, in the same nesting."""


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def as_streams(value: Tensor | Sequence[Tensor]) -> Streams:
    """Return the output of a block as a tuple of tensors."""
    return (value,) if isinstance(value, Tensor) else tuple(value)


def are_integers(targets: Tensor) -> bool:
    """Return whether targets are integers or booleans. Those of signed types may be :data:`IGNORED`."""
    return not (targets.is_floating_point() or targets.is_complex())


def in_own_memory(tensor: Tensor) -> Tensor:
    """Return the tensor, copied if it is a view: a view of a received message would keep the whole message alive."""
    return tensor.clone() if tensor.untyped_storage().nbytes() > tensor.nbytes else tensor


def detached(streams: Streams) -> Streams:
    """Return the tensors detached from their autograd graph."""
    return tuple([t.detach() for t in streams])
