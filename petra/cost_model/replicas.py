"""What sums over replicas add to a pipeline's period."""

from __future__ import annotations

from petra.cost_model.machines import Link
from petra.engine.options.outer_step import OuterStep
from petra.engine.options.sums import PACKED


def sum_bytes(parameters: int, replicas: int, outer: OuterStep) -> float:
    """Return the bytes that a process sends, and as many that it receives, for one sum over the replicas of its stage."""
    width = 4.0 if outer.format is None else PACKED[outer.format].bytes
    return 2 * (replicas - 1) / replicas * width * parameters


def seconds_per_update(parameters: int, replicas: int, link: Link, outer: OuterStep, update: float) -> float:
    """Return the seconds that an update of a stage waits for sums, on average.

    Gradients are summed at every update, and the stage waits. (In a stage of several blocks, the sums of all but its first block
    overlap the last backward pass; this is not counted.) With outer steps, one update in H waits for what is left of a sum after
    ``overlap`` updates. Links between replicas are taken to be others than those between stages.

    Args:
        parameters: Parameters of the stage.
        replicas: Number of replicas.
        link: Link between replicas.
        outer: Outer steps; without any, gradients are summed.
        update: Seconds between two updates.
    """
    if replicas == 1:
        return 0.0
    seconds = sum_bytes(parameters, replicas, outer) / link.bandwidth + 2 * (replicas - 1) * link.latency
    return max(0.0, seconds - outer.overlap * update) / max(outer.every, 1)
