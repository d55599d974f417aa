"""Sums of tensors over replicas, which may travel in fewer bits than they are computed in.

For those, each process of a group sums an equal part of a tensor: it receives this part from all others, adds in their order, and
sends the sum to all. So each process sends and receives 2 (n − 1) / n of the packed tensor, as in a ring; sums are in float32; and
all processes have the same result.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from petra.message_formats import MESSAGE_FORMATS, MessageFormat
from petra.quantization import Quantized

CHUNK = 512
"""Numbers with a common scale."""


@dataclass(frozen=True)
class Packed:
    """Numbers as bytes in a format of messages, whose tokens are chunks.

    Attributes:
        format: The format, with at most one tensor of scales.
    """

    format: MessageFormat

    def pack(self, x: Tensor) -> Tensor:
        """Return bytes (n, b) for numbers (n, CHUNK · c)."""
        pieces = zip(self.format.pack([x.float().view(len(x), -1, CHUNK)]), self._types, strict=False)
        return torch.cat([piece.to(dtype).view(torch.uint8).flatten(1) for piece, dtype in pieces], 1)

    def unpack(self, packed: Tensor) -> Tensor:
        """Return the numbers, in float32."""
        shape = len(packed), round(packed.shape[1] / (self.bytes * CHUNK)), CHUNK
        forms = [*zip((*self.format.elements([shape]), *self.format.factors([shape])), self._types, strict=False)]
        parts = torch.split(packed, [prod(own[1:]) * dtype.itemsize for own, dtype in forms], 1)
        pieces = [part.contiguous().view(dtype).view(own) for part, (own, dtype) in zip(parts, forms, strict=True)]
        return self.format.unpack(pieces, [(shape, torch.float32)])[0].flatten(1)

    @cached_property
    def bytes(self) -> float:
        """Bytes per number."""
        return self.pack(torch.zeros(1, CHUNK)).shape[1] / CHUNK

    @cached_property
    def _types(self) -> list[torch.dtype]:
        """Types of elements and scales."""
        return [getattr(torch, name) for name in (self.format.dtype, self.format.factor_dtype)]


PACKED = {"bf16": Packed(MESSAGE_FORMATS["bf16"]), "int8": Packed(Quantized("int8", False, kind="int8", scale="token"))}
"""Formats by name."""


class PackedSum:
    """Sum of a tensor over a group, in progress, in place.

    Args:
        tensor: Tensor (n,) on the CPU or on the group's device.
        group: Process group.
        format: Format.
    """

    def __init__(self, tensor: Tensor, group: Any, format: Packed) -> None:
        self._tensor, self._group, self._format, size = tensor, group, format, group.size()
        padded = tensor.new_zeros(-(-len(tensor) // (size * CHUNK)) * size * CHUNK)
        padded[: len(tensor)] = tensor
        self._exchange(format.pack(padded.view(size, -1)))
        self._summed = False

    def advance(self) -> None:
        """Sum this process's part, once it has arrived, and send it."""
        if not self._summed:
            self._work.wait()
            total = self._format.unpack(self._received).sum(0, keepdim=True)
            self._exchange(self._format.pack(total).repeat(len(self._received), 1))
            self._summed = True

    def wait(self) -> None:
        """Wait until the tensor is the sum."""
        self.advance()
        self._work.wait()
        self._tensor.copy_(self._format.unpack(self._received).flatten()[: len(self._tensor)])

    def _exchange(self, parts: Tensor) -> None:
        """Send one of ``parts`` to each process, and receive one from each."""
        self._received = torch.empty_like(parts)
        self._sent = parts  # the transfer reads it
        self._work = self._group.alltoall_base(self._received, parts, [], [])


def start_sum(tensor: Tensor, group: Any, packed: Packed | None) -> Any:
    """Start to replace a tensor by its sum over a process group, and return what to wait for."""
    return group.allreduce([tensor]) if packed is None else PackedSum(tensor, group, packed)


class AllReduces:
    """Sums of tensors over the processes that own the same stages, one in each replica, in place.

    Args:
        group: These processes.
        packed: Format in which tensors (n,) travel; None for their own.
    """

    def __init__(self, group: dist.ProcessGroup, packed: Packed | None = None) -> None:
        self._group, self._packed = group, packed
        self._works: list[Any] = []

    def start(self, tensor: Tensor) -> None:
        """Start to replace a tensor by its sum."""
        self._works.append(start_sum(tensor, self._group, self._packed))

    def advance(self) -> None:
        """Start the second half of the way of tensors that travel packed."""
        for work in self._works:
            if isinstance(work, PackedSum):
                work.advance()

    def finish(self) -> float:
        """Wait for all tensors since the last call. Return the factor that makes their sum the sum over all replicas."""
        for work in self._works:
            work.wait()
        self._works.clear()
        return 1.0
