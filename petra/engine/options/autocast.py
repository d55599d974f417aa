"""Autocast: a block computes in a shorter type, and its streams keep theirs."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
from torch import Tensor

from petra.engine.block_function import BlockFunction, WrappedFunction
from petra.engine.weights import WeightVersion
from petra.reversible.replay import autocast_to
from petra.specs import Streams


class Autocast(WrappedFunction):
    """Evaluates a block under autocast, and returns its outputs in the type of its input.

    All streams have one type, because reconstruction must subtract exactly what the forward pass added.

    Args:
        inner: The function to evaluate.
        dtype: Type in which the block computes.
    """

    def __init__(self, inner: BlockFunction, dtype: torch.dtype) -> None:
        super().__init__(inner)
        self._dtype = dtype

    def context(self, x: Tensor, version: WeightVersion | None) -> AbstractContextManager[object]:
        return autocast_to(x.device.type, self._dtype)

    def __call__(self, m: int, x: Streams, version: WeightVersion | None) -> Streams:
        with self.context(x[0], version):
            return self._in_type_of(x[0], self.inner(m, x, version))

    def evaluate(self, x: Streams) -> Streams:
        with self.context(x[0], None):
            return self._in_type_of(x[0], self.inner.evaluate(x))

    def _in_type_of(self, x: Tensor, y: Streams) -> Streams:
        dtype = x.dtype if x.is_floating_point() else torch.get_default_dtype()
        return tuple(t.to(dtype) if t.dtype == self._dtype else t for t in y)
