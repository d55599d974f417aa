"""Sums of tensors over replicas, which may travel in fewer bits than they are computed in.

For those, each process of a group sums an equal part of a tensor: it receives this part from all others, adds in their order, and
sends the sum to all. So each process sends and receives 2 (n − 1) / n of the packed tensor, as in a ring; sums are in float32; and
all processes have the same result.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

CHUNK = 512
"""Numbers with a common scale."""


class Packed(NamedTuple):
    """A format.

    Attributes:
        pack: Maps numbers (n, CHUNK · c) to bytes (n, b).
        unpack: Maps bytes to numbers in float32.
        bytes: Bytes per number.
    """

    pack: Callable[[Tensor], Tensor]
    unpack: Callable[[Tensor], Tensor]
    bytes: float


def _pack_int8(x: Tensor) -> Tensor:
    x = x.float().view(len(x), -1, CHUNK)
    scales = x.abs().amax(2, keepdim=True) / 127
    whole = (x / scales.clamp(min=torch.finfo(torch.float32).tiny)).round().to(torch.int8)
    return torch.cat([whole.view(torch.uint8), scales.view(torch.uint8)], 2).flatten(1)


def _unpack_int8(packed: Tensor) -> Tensor:
    packed = packed.view(len(packed), -1, CHUNK + 4)
    whole, scales = packed[:, :, :CHUNK].contiguous().view(torch.int8), packed[:, :, CHUNK:].contiguous().view(torch.float32)
    return (whole * scales).flatten(1)


PACKED = {
    "bf16": Packed(lambda x: x.bfloat16().view(torch.uint8), lambda b: b.view(torch.bfloat16).float(), 2.0),
    "int8": Packed(_pack_int8, _unpack_int8, 1 + 4 / CHUNK),
}
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
