"""What sums over replicas add to a pipeline's period."""

from __future__ import annotations

from petra.cost_model.machines import Link
from petra.engine.options.outer_step import OuterStep
from petra.engine.options.sums import PACKED


def sum_bytes(parameters: int, replicas: int, outer: OuterStep, shard: bool = False) -> float:
    """Return the bytes that a process sends, and as many that it receives, for one sum over the replicas of its stage.

    With ``shard``, replicas then send each other the weights that they have updated, half as many bytes.
    """
    width = 4.0 if outer.format is None else PACKED[outer.format].bytes
    return (3 if shard else 2) * (replicas - 1) / replicas * width * parameters


def seconds_per_update(parameters: int, replicas: int, link: Link, outer: OuterStep, update: float, shard: bool = False) -> float:
    """Return the seconds that an update of a stage waits for sums, on average.

    Gradients are summed at every update, and the stage waits. (In a stage of several blocks, the sums of all but its first block
    overlap the last backward pass; this is not counted.) With outer steps, one update in H waits for what is left of a sum after
    ``overlap`` updates. Sums in a format travel in two halves, the second from the middle of these updates on. Links between
    replicas are taken to be others than those between stages.

    Args:
        parameters: Parameters of the stage.
        replicas: Number of replicas.
        link: Link between replicas.
        outer: Outer steps; without any, gradients are summed.
        update: Seconds between two updates.
        shard: Whether each replica updates a part of the parameters.
    """
    if replicas == 1:
        return 0.0
    seconds = sum_bytes(parameters, replicas, outer, shard) / link.bandwidth + 2 * (replicas - 1) * link.latency
    middle = (outer.overlap + 1) // 2
    parts = [outer.overlap] if outer.format is None else [middle, outer.overlap - middle]
    return sum(max(0.0, seconds / len(parts) - updates * update) for updates in parts) / max(outer.every, 1)
