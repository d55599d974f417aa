"""Tensors that blocks and stages exchange, and the shape and type that both sides agree on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from petra.errors import ModelError, check_types, invalid, require
from petra.message_formats import MessageFormat

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


PartSpec = tuple[TensorSpec, ...]
MessageSpec = tuple[PartSpec, ...]
"""Specs of the tensors of a :data:`Message`, in the same nesting."""


def format_of(name: str) -> MessageFormat:
    """Return the format of messages of a name."""
    from petra.quantization import format_named

    return format_named(name)


class PackedPart:
    """What travels for a part of a message: its streams in their format, then the tensors that travel as they are.

    Attributes:
        specs: Specs of what travels.
        bytes: Size in bytes of what travels.
    """

    def __init__(self, part: PartSpec) -> None:
        streams = [(i, spec) for i, spec in enumerate(part) if spec.message_format is not None]
        others = [(i, spec) for i, spec in enumerate(part) if spec.message_format is None]
        self._order = sorted(range(len(part)), key=[i for i, _ in (*streams, *others)].__getitem__)
        self._positions = [i for i, _ in streams], [i for i, _ in others]
        self._forms = [(spec.shape, spec.dtype) for _, spec in streams]
        self.specs: list[TensorSpec] = []
        for _, spec in streams[:1]:
            assert spec.message_format is not None
            self._format, shapes = format_of(spec.message_format), [own.shape for _, own in streams]
            for shape, (_, own) in zip(self._format.elements(shapes), streams, strict=True):
                channels_last = own.channels_last and shape == own.shape
                self.specs.append(TensorSpec(shape, getattr(torch, self._format.dtype), channels_last))
            self.specs += [TensorSpec(shape, getattr(torch, self._format.factor_dtype)) for shape in self._format.factors(shapes)]
        self._pieces = len(self.specs)
        self.specs += [spec for _, spec in others]
        self.bytes = sum(spec.bytes for spec in self.specs)

    def pack(self, tensors: Streams) -> Sequence[Tensor]:
        """Return what travels for the tensors of the part."""
        streams, others = ([tensors[i] for i in positions] for positions in self._positions)
        pieces = self._format.pack(streams) if streams else []
        return [*(t.to(spec.dtype) for t, spec in zip(pieces, self.specs, strict=False)), *others]

    def unpack(self, pieces: Sequence[Tensor]) -> Streams:
        """Return the tensors of the part from what has arrived."""
        streams = self._format.unpack(pieces[: self._pieces], self._forms) if self._forms else []
        found = [*streams, *pieces[self._pieces :]]
        return tuple([found[i] for i in self._order])


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
