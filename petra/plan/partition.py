"""Partition a sequence of items into contiguous parts so that the most expensive part is as cheap as possible."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

from petra.errors import ConfigError, require


def balanced_partition(costs: Sequence[float], parts: int) -> list[range]:
    """Partition items into ``parts`` contiguous, non-empty ranges that minimise the cost of the most expensive range.

    If several partitions are optimal, return the one with the smallest first ranges.

    Raises:
        ConfigError: If there are fewer items than parts.
    """
    total = [0.0, *accumulate(costs)]
    return best_partition(len(costs), parts, lambda start, end, part: total[end] - total[start])


def best_partition(items: int, parts: int, cost: Callable[[int, int, int], float]) -> list[range]:
    """Solve the problem of :func:`balanced_partition` where the cost of a range also depends on which part it becomes.

    The solution is exact: dynamic programming in O(items² · parts).

    Args:
        cost: ``cost(start, end, part)`` is the cost of items ``start`` … ``end`` − 1 as part number ``part``. An infinite cost
            forbids the choice.

    Raises:
        ConfigError: If there are fewer items than parts, or if every partition contains a part of infinite cost.
    """
    require(1 <= parts <= items, "parts", f"an integer from 1 to {items} (the number of items)", parts)
    # worst[p][i]: smallest possible cost of the most expensive part when items i, i + 1, … form the last p parts.
    # end[p][i]: where the first of those p parts ends in that solution.
    worst = [[float("inf")] * (items + 1) for _ in range(parts + 1)]
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
        raise ConfigError(f"no partition into {parts} parts keeps every part within its limit")
    ranges, start = [], 0
    for p in range(parts, 0, -1):
        ranges.append(range(start, end[p][start]))
        start = end[p][start]
    return ranges


def partition_of(sizes: Sequence[int]) -> list[range]:
    """Return the contiguous ranges that have these sizes."""
    return [range(start, end) for start, end in pairwise(accumulate(sizes, initial=0))]
