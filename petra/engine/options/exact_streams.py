"""Exact streams: reversible blocks round to a grid, and streams that other blocks return are rounded to it."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist

from petra.engine.block_function import BlockFunction, WrappedFunction
from petra.engine.stage import Stage
from petra.engine.weights import WeightVersion
from petra.reversible import Grid, ReversibleBlock
from petra.specs import Streams


class OnGrid(WrappedFunction):
    """Evaluates a block with exact streams (:mod:`petra.reversible.grid`).

    Args:
        inner: The function to evaluate.
        grid: Grid of the stage.
    """

    def __init__(self, inner: BlockFunction, grid: Grid) -> None:
        super().__init__(inner)
        self.grid = grid
        self._rounds = not isinstance(inner.module, ReversibleBlock)
        if isinstance(inner.module, ReversibleBlock):
            inner.module.enable_exact_streams(grid)

    def __call__(self, m: int, x: Streams, version: WeightVersion | None) -> Streams:
        return self._enter(self.inner(m, x, version))

    def evaluate(self, x: Streams) -> Streams:
        largest = self.grid.largest
        y = self._enter(self.inner.evaluate(x))
        self.grid.largest = largest  # nothing is reconstructed, so streams may leave the grid's range
        return y

    def _enter(self, y: Streams) -> Streams:
        return tuple(self.grid.enter(t) for t in y) if self._rounds and len(y) > 1 else y


def check_range(joint: Grid, stages: Iterable[Stage]) -> None:
    """Check that exact streams stayed in the range of the grid. Every rank must call this function.

    Args:
        joint: A new grid, for the largest magnitude of all stages.
        stages: Stages of this rank.

    Raises:
        ModelError: If they exceeded it at a stage. Raised on every rank.
    """
    functions = [stage.runners[0].function for stage in stages]
    joint.largest = torch.stack([joint.largest, *(f.grid.largest for f in functions if isinstance(f, OnGrid))]).amax()
    if dist.is_initialized():
        dist.all_reduce(joint.largest, dist.ReduceOp.MAX)
    joint.require()
