"""A stage outside of a pipeline."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from petra.engine.accumulation import Accumulation
from petra.engine.block import block_runner
from petra.engine.build import block_function
from petra.engine.stage import Stage
from petra.engine.weights import weight_versions
from petra.method import Keep, Weights
from petra.reversible import Grid, derive_seed
from petra.settings import Numerics


def simple_stage(
    blocks: Sequence[nn.Module],
    keeps: Sequence[Keep],
    *,
    first_block: int = 0,
    weights: Weights = Weights.CURRENT,
    k: int = 1,
    seed: int = 0,
    numerics: Numerics = Numerics(),  # noqa: B008 (frozen)
    cast_once: bool = False,
) -> Stage:
    """Build a stage outside of a pipeline, for measurements.

    Args:
        blocks: Modules on their device, in training mode.
        keeps: What each block stores between its passes.
        first_block: Index of the first block in the model. A block's random numbers derive from the seed and its index.
        weights: Which weights backward passes differentiate.
        k: Microbatches per update.
        seed: Seed of the run.
        numerics, cast_once: As for :func:`block_function`.
    """
    grid, runners = Grid() if numerics.exact_streams else None, []
    for b, (block, keep) in enumerate(zip(blocks, keeps, strict=True), first_block):
        function = block_function(block, derive_seed(seed, b), numerics=numerics, grid=grid, cast_once=cast_once)
        versions = weight_versions(function.parameters, weights, keeps_graph=keep is Keep.GRAPH, k=k)
        runners.append(block_runner(function, keep, versions, first=b == 0))
    return Stage(runners, Accumulation(nn.ModuleList(blocks), k), channels_last=numerics.channels_last)
