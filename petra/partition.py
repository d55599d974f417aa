"""Where everything stands: contiguous blocks in each stage, contiguous stages in each process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from petra.errors import ConfigError
from petra.model import BlockProfile, Model
from petra.streams import TensorSpec


def balanced_cut(costs: Sequence[float], parts: int) -> list[range]:
    """Cuts items into ``parts`` contiguous non-empty ranges such that the most expensive one is as cheap as can be.

    Among the best cuts it takes the one with the smallest first ranges.

    Raises:
        ConfigError: more parts than items.
    """
    total = [0.0, *accumulate(costs)]
    return best_cut(len(costs), parts, lambda start, end, part: total[end] - total[start])


def best_cut(items: int, parts: int, cost: Callable[[int, int, int], float]) -> list[range]:
    """As :func:`balanced_cut`, where the cost of a range may depend on its place: an exact dynamic programme in O(items² · parts).

    Args:
        cost: of items ``start`` … ``end`` − 1 as part ``part``; infinite if they may not be one.

    Raises:
        ConfigError: more parts than items, or every cut has a part that may not be.
    """
    if not 1 <= parts <= items:
        raise ConfigError(f"can't cut {items} items into {parts} contiguous parts; accepted are 1 to {items}")
    worst = [[float("inf")] * (items + 1) for _ in range(parts + 1)]  # worst[p][i]: of items i … in the last p parts
    end = [[items] * (items + 1) for _ in range(parts + 1)]
    worst[0][items] = 0.0
    for p in range(1, parts + 1):
        for i in range(parts - p, items - p + 1):
            for e in range(i + 1, items - p + 2):
                if worst[p - 1][e] < worst[p][i]:
                    value = max(cost(i, e, parts - p), worst[p - 1][e])
                    if value < worst[p][i]:
                        worst[p][i], end[p][i] = value, e
    if worst[parts][0] == float("inf"):
        raise ConfigError(f"found no cut into {parts} parts of which each is within its limit")
    ranges, start = [], 0
    for p in range(parts, 0, -1):
        ranges.append(range(start, end[p][start]))
        start = end[p][start]
    return ranges


@dataclass(frozen=True)
class Layout:
    """The cut of one model for one set of processes."""

    profiles: tuple[BlockProfile, ...]
    stages: tuple[range, ...]
    """For each stage its blocks."""
    processes: tuple[range, ...]
    """For each process its stages; empty for those beyond the number of stages."""

    @staticmethod
    def plan(model: Model, inputs: TensorSpec, stages: int | Sequence[int] | None, processes: int) -> Layout:
        """Balances the FLOPs of stages over processes, and those of blocks over stages if there are fewer stages than blocks.

        Args:
            stages: how many; None for one for each block; or the number of blocks in each.

        Raises:
            ConfigError: more processes or stages than blocks.
            ModelError: blocks that don't fit each other.
        """
        n = len(model.blocks)
        if processes > n:
            raise ConfigError(f"processes: found {processes}, accepted are 1 to {n}, since {model.name} has {n} blocks")
        if isinstance(stages, int) and not 1 <= stages <= n:
            raise ConfigError(f"stages: found {stages}, accepted are 1 to {n}, since {model.name} has {n} blocks")
        profiles = model.profile(inputs)
        costs = [profile.flops for profile in profiles]
        if stages is None or isinstance(stages, int):
            blocks = balanced_cut(costs, stages or n)
        else:
            if sum(stages) != n or min(stages) < 1:
                raise ConfigError(f"stages: found {list(stages)}, accepted are positive numbers of blocks that sum to {n}")
            blocks = [range(sum(stages[:j]), sum(stages[: j + 1])) for j in range(len(stages))]
        stage_costs = [sum(costs[b] for b in stage) for stage in blocks]
        used = balanced_cut(stage_costs, min(processes, len(blocks)))
        return Layout(profiles, tuple(blocks), (*used, *[range(0)] * (processes - len(used))))
