"""What travels between blocks and stages: tensors called streams, and their agreed form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from petra.errors import ModelError

Streams = tuple[Tensor, ...]
"""One tensor, or the pair (x1, x2) of a reversible network."""

Message = tuple[Streams, ...]
"""What one stage sends another for a microbatch: ``(x,)`` forward; ``(x̃, δ, (report,))`` backward, x̃ empty if nobody needs it."""


IGNORED = -100
"""The target of a row that only fills up a microbatch; ``torch.nn.functional.cross_entropy`` skips it by default."""


@dataclass(frozen=True)
class TensorSpec:
    """The agreed form of one travelling tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    channels_last: bool = False
    wire: torch.dtype | None = None
    """The type in which it travels between stages, if that is another."""

    @property
    def bytes(self) -> int:
        return self.dtype.itemsize * torch.Size(self.shape).numel()

    def require(self, tensor: Tensor, what: str) -> None:
        """Raises :class:`petra.errors.ModelError` unless a tensor has this shape and type; ``what`` names it."""
        if tuple(tensor.shape) != self.shape or tensor.dtype != self.dtype:
            found = TensorSpec(tuple(tensor.shape), tensor.dtype)
            raise ModelError(f"{what}: found {found}, accepted is {self}")

    def __str__(self) -> str:
        wire = "" if self.wire is None else f" as {_name(self.wire)}"
        return f"{_name(self.dtype)}{list(self.shape)}{wire}"


MessageSpec = tuple[tuple[TensorSpec, ...], ...]
"""The agreed form of a :data:`Message`."""


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def as_streams(value: Tensor | Sequence[Tensor]) -> Streams:
    """A block's result as a tuple of streams."""
    return (value,) if isinstance(value, Tensor) else tuple(value)


def detached(streams: Streams) -> Streams:
    return tuple(t.detach() for t in streams)
