"""Exact streams: reversible blocks round to a grid, and streams that other blocks return are rounded to it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from petra.engine.block_function import Around
from petra.engine.stage import Stage
from petra.plan import Plan
from petra.reversible import Grid, ReversibleBlock
from petra.reversible.replay import NOTHING
from petra.specs import Streams, side_tensors, without_side


class OnGrid(Around):
    """Evaluates a block with exact streams (:mod:`petra.reversible.grid`).

    Args:
        block: The block.
        grid: Grid of the stage.
    """

    def __init__(self, block: nn.Module, grid: Grid) -> None:
        self.grid, self._rounds = grid, not isinstance(block, ReversibleBlock)
        if isinstance(block, ReversibleBlock):
            block.enable_exact_streams(grid)

    def context(self, x: Tensor, *, training: bool) -> AbstractContextManager[object]:
        return NOTHING if training else self._unrecorded()

    def outputs(self, x: Tensor, y: Streams, *, training: bool) -> Streams:
        enter = self.grid.enter if training else self.grid.round
        streams = without_side(y)
        return (*map(enter, streams), *side_tensors(y)) if self._rounds and len(streams) > 1 else y

    @contextmanager
    def _unrecorded(self) -> Iterator[None]:
        """Record no magnitudes in an evaluation: nothing is reconstructed, so streams may leave the grid's range."""
        largest = self.grid.largest
        yield
        self.grid.largest = largest


def grid_of(plan: Plan, device: torch.device) -> Grid:
    """Return a new grid in the type of a plan's streams."""
    pairs = [profile.outputs for profile in plan.layout.profiles if profile.reversible]
    return Grid(pairs[0][0].dtype if pairs else torch.float32, device)


def check_range(plan: Plan, device: torch.device, stages: Iterable[Stage]) -> None:
    """Check that exact streams stayed in the range of the grid. Every rank must call this function, with its stages.

    Raises:
        ModelError: If they exceeded it at a stage. Raised on every rank.
    """
    around = [each for stage in stages for each in stage.runners[0].function.around]
    joint = grid_of(plan, device)  # with the largest magnitude of all stages
    joint.largest = torch.stack([joint.largest, *(each.grid.largest for each in around if isinstance(each, OnGrid))]).amax()
    if dist.is_initialized():
        dist.all_reduce(joint.largest, dist.ReduceOp.MAX)
    joint.require()
