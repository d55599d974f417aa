"""Messages packed into one contiguous buffer each. Both ends of a boundary agree on the form at start."""

from __future__ import annotations

from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from petra.specs import REPORT, Message, MessageSpec, PackedPart, TensorSpec, is_side

Views = list[list[Tensor]]  # what travels for each part of a message
_ALIGNMENT = 64
"""Alignment of each tensor in bytes. Kernels choose their code path by alignment, and results must not depend on the transport."""


class _Place(NamedTuple):
    """Where a tensor is in a buffer. The offset is in elements."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    @staticmethod
    def of(spec: TensorSpec, start: int) -> _Place:
        """Return the place of a tensor that begins at byte ``start``."""
        memory_format = torch.channels_last if spec.channels_last else torch.contiguous_format
        strides = torch.empty(spec.shape, device="meta", memory_format=memory_format).stride()
        return _Place(spec.dtype, spec.shape, strides, start // spec.dtype.itemsize)


class Packing:
    """Packs messages of one fixed form into byte buffers and unpacks them again, without pickling.

    Args:
        spec: Shapes and types of the tensors in a message.
        device: Device of buffers.
        route: Sender and receiver, for error messages: ``the message of stage 1 to stage 2``.

    Attributes:
        bytes: Size of a buffer.
    """

    def __init__(self, spec: MessageSpec, device: torch.device, route: str) -> None:
        self.spec, self.device, self.route = spec, device, route
        self._parts = [PackedPart(part) for part in spec]
        packed = [piece for part in self._parts for piece in part.specs]
        *starts, self.bytes = accumulate((-(-piece.bytes // _ALIGNMENT) * _ALIGNMENT for piece in packed), initial=0)
        places = iter(starts)
        self._places = [[_Place.of(piece, next(places)) for piece in part.specs] for part in self._parts]
        self._dtypes = {piece.dtype for piece in packed}
        self._free: list[tuple[Tensor, Views]] = []
        self._sent: dict[int, Views] = {}

    def buffer(self) -> Tensor:
        """Return a new, uninitialized buffer: uint8, of shape (bytes,)."""
        return torch.empty(self.bytes, dtype=torch.uint8, device=self.device)

    def pack(self, message: Message) -> Tensor:
        """Copy a message into a free buffer and return it. Call :meth:`release` with the buffer once it has been sent.

        Raises:
            ModelError: If a tensor differs from its spec.
        """
        if not self._free:
            new = self.buffer()
            self._free.append((new, self._views(new)))
        buffer, views = self._free.pop()
        self._sent[id(buffer)] = views
        for targets, part, sources, specs in zip(views, self._parts, message, self.spec, strict=True):
            for source, spec in zip(sources, specs, strict=True):
                spec.require(source, self.route)  # copy_ would broadcast or round it silently
            for target, piece in zip(targets, part.pack(sources), strict=True):
                target.copy_(piece)
        return buffer

    def release(self, buffer: Tensor) -> None:
        """Mark a packed buffer as sent, so that it can be reused."""
        self._free.append((buffer, self._sent.pop(id(buffer))))

    def unpack(self, buffer: Tensor) -> Message:
        """Return the message in a buffer. Tensors are views of it, or copies if they travel in another format.

        A report is a copy: it travels on to the first stage, and a view would keep the whole message alive. So are side tensors.
        """
        message = [part.unpack(pieces) for part, pieces in zip(self._parts, self._views(buffer), strict=True)]
        streams = (tuple(t.clone() if is_side(t) else t for t in part) for part in message[:REPORT])
        return (*streams, *(tuple(t.clone() for t in part) for part in message[REPORT:]))

    def _views(self, buffer: Tensor) -> Views:
        typed = {dtype: buffer.view(dtype) for dtype in self._dtypes}
        return [[typed[p.dtype].as_strided(p.shape, p.strides, p.offset) for p in places] for places in self._places]
