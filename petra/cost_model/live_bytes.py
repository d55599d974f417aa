"""Counts the bytes of tensors while they live, as torch's CUDA allocator does."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from petra.torch_private import DEVICE, TorchDispatchMode, storage_key

BLOCK = 512
"""Sizes of tensors are rounded up to a multiple of this number of bytes, as torch's CUDA allocator does."""
CPU = torch.device("cpu")


def rounded(size: int) -> int:
    """Return the bytes that the allocator takes for a tensor of ``size`` bytes."""
    return -(-size // BLOCK) * BLOCK


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of storages that operations inside the ``with`` block create, while they live.

    Attributes:
        now: Bytes that live now.
        owner: Stage that runs, which new storages count for.
        own: Bytes that live now, by the stage that they count for.
        peaks: Most bytes that lived at a time, of all stages, by the stage that ran.
        most: Most bytes that lived at a time since the caller last set it.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.owner = self.most = 0
        self.own, self.peaks = Counter[int](), Counter[int]()
        self._seen: dict[int, _Storage] = {}

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if function is DEVICE:
            return CPU  # of all tensors here; FakeTensorMode would take longer, and each operation asks several times
        if function.name().startswith("aten::_fused_") and not function._schema.returns:
            return None  # updates in place; FakeTensorMode would run the optimizer's kernel on real tensors
        found = function(*args, **(kwargs or {}))
        for value in found if isinstance(found, list | tuple) else (found,):
            for tensor in value if isinstance(value, list | tuple) else (value,):
                if isinstance(tensor, Tensor):
                    self._add(tensor)
        return found

    def assign(self, tensors: Iterable[Tensor], owner: int) -> None:
        """Count the storages of tensors for another stage from now on."""
        for tensor in tensors:
            if (found := self._seen.get(storage_key(tensor))) is not None:
                self.own[found.owner] -= found.size
                self.own[owner] += found.size
                found.owner = owner

    def count(self, more: int) -> None:
        """Count ``more`` bytes that live for a moment only."""
        self.most = max(self.most, self.now + more)
        self.peaks[self.owner] = max(self.peaks[self.owner], self.now + more)

    def _add(self, tensor: Tensor) -> None:
        key, storage = storage_key(tensor), tensor.untyped_storage()
        if key in self._seen:
            return

        def freed(_: object) -> None:
            gone = self._seen.pop(key)
            self.now -= gone.size
            self.own[gone.owner] -= gone.size

        found = _Storage(weakref.ref(storage, freed), rounded(storage.nbytes()), self.owner)
        self._seen[key] = found
        self.now += found.size
        self.own[self.owner] += found.size
        self.count(0)


@dataclass
class _Storage:
    """A storage that lives, its size, and the stage that it counts for."""

    reference: weakref.ref[Any]
    size: int
    owner: int
