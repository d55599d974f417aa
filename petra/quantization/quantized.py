"""Formats of few bits: elements times scales, which travel with them.

A scale is the largest magnitude of its part of a message, divided by the largest element. Stochastic rounding is unbiased: its
random numbers are a hash of the position and of all entries of the message, so they need no state, and are the same whenever and
wherever the same tensors are packed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from petra.message_formats import MESSAGE_FORMATS, Form, MessageFormat, Shape

LARGEST = {"int8": 127, "int4": 7, "float8": 448}
"""Largest element of each kind."""
DTYPES = {"int8": "int8", "int4": "uint8", "float8": "float8_e4m3fn"}
"""Type that travels. A byte has two elements of int4."""
PART = 2**18
"""Most elements for which random numbers are computed at a time, since they take many times the memory of the elements."""


@dataclass(frozen=True)
class Quantized(MessageFormat):
    """Elements of few bits with scales.

    A value that is not finite makes its scale not finite, and so every value with that scale that arrives.

    Attributes:
        kind: ``int8`` (-127 to 127), ``int4`` (-7 to 7) or ``float8`` (E4M3).
        scale: What has a scale of its own: each ``tensor`` (float32), or each ``token``, the channels of one position (bf16).
        stochastic: Whether integers are rounded up with the probability of the fraction that rounding off would drop.
    """

    kind: str = "int8"
    scale: str = "tensor"
    stochastic: bool = False

    def elements(self, shapes: Sequence[Shape]) -> Sequence[Shape]:
        return [(-(-math.prod(shape) // 2),) for shape in shapes] if self.kind == "int4" else shapes

    def factors(self, shapes: Sequence[Shape]) -> Sequence[Shape]:
        if self.scale == "token":
            return [tuple(1 if i == _channel(shape) else size for i, size in enumerate(shape)) for shape in shapes]
        return [(1,)] * len(shapes)

    def pack(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        scales = [self._range(t).div(LARGEST[self.kind]).clamp(min=1e-30) for t in tensors]  # zeros have one, too
        scales = [scale.to(getattr(torch, self.factor_dtype)) for scale in scales]
        key = torch.stack([t.float().contiguous().view(torch.int32).sum() for t in tensors]).sum() if self.stochastic else None
        return [*(self._rounded(t / s.float(), i, key) for i, (t, s) in enumerate(zip(tensors, scales, strict=True))), *scales]

    def unpack(self, pieces: Sequence[Tensor], forms: Sequence[Form]) -> Sequence[Tensor]:
        elements, scales = pieces[: len(forms)], [scale.float() for scale in pieces[len(forms) :]]
        found = []
        for element, scale, (shape, dtype) in zip(elements, scales, forms, strict=True):
            values = _halves(element, shape) if self.kind == "int4" else element
            found.append((values.float() * scale).to(dtype))
        return found

    def _range(self, t: Tensor) -> Tensor:
        """Return the largest magnitudes, in float32."""
        dims = (_channel(t.shape),) if self.scale == "token" else tuple(range(t.dim()))
        largest = t.amax(dims, keepdim=True).maximum(-t.amin(dims, keepdim=True)).float()  # aminmax takes five times as long
        return largest if self.scale == "token" else largest.view(1)

    def _rounded(self, t: Tensor, index: int, key: Tensor | None) -> Tensor:
        """Return the elements of a scaled tensor, which is overwritten."""
        largest = LARGEST[self.kind]
        if self.kind != "float8":
            t = t.round_() if key is None else _add_uniform(t, hash_bits(key + index)).floor_()
        t = t.clamp_(-largest, largest)
        if self.kind != "int4":
            return t
        flat = torch.cat([(t + 8).flatten(), t.new_zeros(t.numel() % 2)]).to(torch.uint8).view(-1, 2)
        return flat[:, 0] | flat[:, 1] << 4


def format_named(name: str) -> MessageFormat:
    """Return the format of a name: a row of ``MESSAGE_FORMATS``, or a kind and then what differs from its defaults."""
    if name in MESSAGE_FORMATS:
        return MESSAGE_FORMATS[name]
    kind, *marks = name.split("_")
    scale, factor = ("token", "bfloat16") if "token" in marks else ("tensor", "float32")
    return Quantized(DTYPES[kind], False, factor, kind, scale, "stochastic" in marks)


def hash_bits(x: Tensor) -> Tensor:
    """Return well-mixed integers of 32 bits for integers (Wellons 2018, "Prospecting for hash functions", lowbias32), as int64."""
    x = x & 0xFFFFFFFF
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x = ((x ^ (x >> shift)) * factor) & 0xFFFFFFFF  # a product that overflows has the right lower bits
    return x ^ (x >> 16)


def _parts(t: Tensor, start: int = 0) -> Iterator[tuple[int, Tensor]]:
    """Yield views of all elements of a tensor, at most :data:`PART` each, and how many elements come before."""
    size = t.numel() // max(1, len(t))
    if size > PART:
        for i, row in enumerate(t):
            yield from _parts(row, start + i * size)
    else:
        rows = PART // max(1, size)
        for i in range(0, len(t), rows):
            yield start + i * size, t[i : i + rows]


def _add_uniform(t: Tensor, key: Tensor) -> Tensor:
    """Add to each element of a tensor a number from 0 to 1, without 1, that depends on its position and the key."""
    for start, part in _parts(t):
        positions = torch.arange(start, start + part.numel(), device=t.device).view(part.shape)
        part.add_((hash_bits(positions + key) >> 8).to(t.dtype) * 2**-24)
    return t


def _halves(packed: Tensor, shape: Shape) -> Tensor:
    """Return elements of int4, two of which each byte has, as int8."""
    both = torch.stack([packed & 15, packed >> 4], 1).flatten()[: math.prod(shape)]
    return both.to(torch.int8).view(shape) - 8


def _channel(shape: Sequence[int]) -> int:
    """Return the dimension of the channels: the second of images, and otherwise the last."""
    return 1 if len(shape) == 4 else len(shape) - 1
