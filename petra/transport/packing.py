"""A message as one contiguous buffer, in a form that both ends of a boundary agreed on at start."""

from __future__ import annotations

from itertools import accumulate

import torch
from torch import Tensor

from petra.specs import Message, MessageSpec, TensorSpec

_ALIGNMENT = 64  # bytes: kernels choose their path by alignment, and results must not depend on the transport


class Packing:
    """Packs messages of one fixed form into byte buffers and back; nothing is pickled, receivers get views.

    Args:
        route: who sends to whom, for errors.
    """

    def __init__(self, spec: MessageSpec, device: torch.device, route: str) -> None:
        self.spec, self.device, self.route = spec, device, route
        sizes = [(t.wire or t.dtype).itemsize * torch.Size(t.shape).numel() for group in spec for t in group]
        padded = [-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes]
        *starts, self.bytes = accumulate(padded, initial=0)
        self._spans = [(start, start + size) for start, size in zip(starts, sizes, strict=True)]
        self._free: list[tuple[Tensor, Message]] = []
        self._sent: dict[int, Message] = {}

    def buffer(self) -> Tensor:
        return torch.empty(self.bytes, dtype=torch.uint8, device=self.device)

    def pack(self, message: Message) -> Tensor:
        """Copies a message into a buffer, which comes back through :meth:`release`.

        Raises:
            ModelError: it has another form than agreed; ``copy_`` would broadcast or round it silently.
        """
        if not self._free:
            fresh = self.buffer()
            self._free.append((fresh, self._views(fresh)))
        buffer, views = self._free.pop()
        self._sent[id(buffer)] = views
        for part, source, specs in zip(views, message, self.spec, strict=True):
            for target, tensor, spec in zip(part, source, specs, strict=True):
                spec.require(tensor, self.route)
                target.copy_(tensor)
        return buffer

    def release(self, buffer: Tensor) -> None:
        """A packed message has been sent, so its buffer may carry the next one."""
        self._free.append((buffer, self._sent.pop(id(buffer))))

    def unpack(self, buffer: Tensor) -> Message:
        """The message: views of the buffer, but for what travelled in another type."""
        return tuple(
            tuple(t if spec.wire is None else t.to(spec.dtype) for t, spec in zip(part, specs, strict=True))
            for part, specs in zip(self._views(buffer), self.spec, strict=True)
        )

    def _views(self, buffer: Tensor) -> Message:
        spans = iter(self._spans)
        return tuple(tuple(_view(buffer[slice(*next(spans))], spec) for spec in group) for group in self.spec)


def rounded(message: Message, spec: MessageSpec) -> Message:
    """What a receiver would get of a message that travels in the types of ``spec``."""
    return tuple(
        tuple(t if s.wire is None else t.to(s.wire).to(s.dtype) for t, s in zip(part, specs, strict=True))
        for part, specs in zip(message, spec, strict=True)
    )


def _view(part: Tensor, spec: TensorSpec) -> Tensor:
    flat = part.view(spec.wire or spec.dtype)
    if spec.channels_last:
        n, c, h, w = spec.shape
        return flat.view(n, h, w, c).permute(0, 3, 1, 2)
    return flat.view(spec.shape)
