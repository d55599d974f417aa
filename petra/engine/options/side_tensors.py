"""Side tensors of a stage that reconstructs: backward messages don't bring them back, so its last block stores them."""

from __future__ import annotations

from petra.engine.block import Stored, WrappedRunner
from petra.reversible import Gradients
from petra.specs import Streams, in_own_memory, side_tensors, without_side


class KeepSideTensors(WrappedRunner):
    """Last block of a stage: stores the side tensors of its output, for itself and the blocks before it."""

    def forward(self, m: int, x: Streams) -> Streams:
        y = super().forward(m, x)
        self.stored[m] = Stored(tuple(in_own_memory(t) for t in side_tensors(y)))
        return y

    def backward(self, m: int, y: Streams, dy: Streams) -> tuple[Streams, Streams, Gradients]:
        return super().backward(m, (*without_side(y), *self.stored.pop(m).inputs), dy)
