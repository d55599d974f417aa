"""Autocast: a block computes in a shorter type, and its streams keep theirs."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
from torch import Tensor

from petra.engine.block_function import Around
from petra.reversible.replay import autocast_to
from petra.specs import Streams


class Autocast(Around):
    """Evaluates a block under autocast to a type, and returns its outputs in the type of its input.

    All streams have one type, because reconstruction must subtract exactly what the forward pass added.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def context(self, x: Tensor, *, training: bool) -> AbstractContextManager[object]:
        return autocast_to(x.device.type, self._dtype)

    def outputs(self, x: Tensor, y: Streams, *, training: bool) -> Streams:
        dtype = x.dtype if x.is_floating_point() else torch.get_default_dtype()
        return tuple(t.to(dtype) if t.dtype == self._dtype else t for t in y)
