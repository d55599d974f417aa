"""Partition a sequence of items into contiguous parts so that the most expensive part is as cheap as possible."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

import numpy as np
from numpy.typing import NDArray

from petra.errors import ConfigError, require

Indices = NDArray[np.int64]
Values = NDArray[np.float64]
RangeCosts = Callable[[Indices, Indices, int], Values]
"""Function (starts, ends, part) → cost of each range of items ``start`` … ``end`` − 1 as part number ``part``."""


def balanced_partition(costs: Sequence[float], parts: int) -> list[range]:
    """Partition items into ``parts`` contiguous, non-empty ranges that minimise the cost of the most expensive range.

    Of partitions with the same maximum, choose the one whose second most expensive range is cheapest, and so on. If several are
    left, return the one with the smallest first range; likewise for the ranges after it.

    Costs of ranges are compared as one integer, whose digits count the ranges of each cost: the digit of a higher cost is more
    significant. Adding the same range to two partitions does not change which of them is better, so dynamic programming is exact.

    Args:
        costs: Cost of each item, at least 0.

    Raises:
        ConfigError: If there are fewer items than parts.
    """
    items = len(costs)
    if parts == items:
        return [range(i, i + 1) for i in range(parts)]
    sums, total = prefix_sums(costs), list(accumulate(costs, initial=0))
    fastest = best_partition(items, parts, lambda starts, ends, part: sums[ends] - sums[starts])
    limit: float = max(total[part.stop] - total[part.start] for part in fastest)
    limit += 1e-12 * total[-1]  # sums may be rounded
    ends = [bisect_right(total, total[start] + limit) for start in range(items)]  # after the last end within the limit
    distinct = sorted({total[end] - total[start] for start in range(items) for end in range(start + 1, ends[start])})
    digit = {cost: (parts + 1) ** place for place, cost in enumerate(distinct)}
    rest = {items: 0}  # digits of the best partition of the items from each one on into the last p parts
    choices: list[dict[int, int]] = []
    for p in range(1, parts + 1):
        starts = range(parts - p, items - p + 1) if p < parts else range(1)
        found: dict[int, tuple[int, int]] = {}
        for start in starts:
            options = ((digit[total[end] - total[start]] + rest[end], end) for end in range(start + 1, ends[start]) if end in rest)
            if (best := min(options, default=None)) is not None:
                found[start] = best
        rest = {start: value for start, (value, _) in found.items()}
        choices.append({start: end for start, (_, end) in found.items()})
    ranges, start = [], 0
    for choice in reversed(choices):
        ranges.append(range(start, choice[start]))
        start = choice[start]
    return ranges


def best_partition(items: int, parts: int, cost: RangeCosts) -> list[range]:
    """Minimise the cost of the most expensive range, where the cost of a range also depends on which part it becomes.

    If several partitions are optimal, return the one with the smallest first range; likewise for the ranges after it.

    The solution is exact: dynamic programming in O(items · parts · log items). For each first item of a part, a binary search finds
    the end at which the part becomes more expensive than the most expensive of the parts after it.

    Args:
        cost: Costs of ranges. An infinite cost forbids a range. A longer range with the same start must not be cheaper.

    Raises:
        ConfigError: If there are fewer items than parts, or if every partition contains a part of infinite cost.
    """
    require(1 <= parts <= items, "parts", f"an integer from 1 to {items} (the number of items)", parts)
    # worst[p][i]: smallest possible cost of the most expensive part when items i, i + 1, … form the last p parts.
    worst = [np.full(items + 1, np.inf)]
    worst[0][items] = 0.0
    for p in range(1, parts + 1):
        worst.append(_add_part(worst[-1], cost, items, parts, p))
    if worst[parts][0] == np.inf:
        raise ConfigError(f"no partition into {parts} parts keeps every part within its limit")
    ranges, start = [], 0
    for p in range(parts, 0, -1):
        end = start + 1 + int(np.argmax(worst[p - 1][start + 1 :] <= worst[p][start]))
        ranges.append(range(start, end))
        start = end
    return ranges


def _add_part(after: Values, cost: RangeCosts, items: int, parts: int, p: int) -> Values:
    """Return ``worst[p]`` of :func:`best_partition`, given ``after = worst[p - 1]``.

    With c(e) the cost of a part that ends at e, and w(e) the smallest value of ``after`` at its possible ends up to e, the solution
    is the minimum of max(c(e), w(e)). c rises and w falls with e, so the minimum is where they cross.
    """
    smallest = RangeExtrema(after, np.minimum)
    starts = np.arange(parts - p, items - p + 1)
    low, high = starts + 1, np.full(len(starts), items - p + 2)  # the first end at which c >= w is in low … high
    while (open_ := low < high).any():
        middle = np.minimum((low + high) // 2, items - p + 1)
        crossed = cost(starts, middle, parts - p) >= smallest(starts + 1, middle + 1)
        high, low = np.where(open_ & crossed, middle, high), np.where(open_ & ~crossed, middle + 1, low)
    found = np.full(items + 1, np.inf)
    at, before = np.minimum(low, items - p + 1), np.maximum(low - 1, starts + 1)
    at_crossing = np.where(low <= items - p + 1, cost(starts, at, parts - p), np.inf)
    before_crossing = np.where(low > starts + 1, smallest(starts + 1, before + 1), np.inf)
    found[starts] = np.minimum(at_crossing, before_crossing)
    return found


class RangeExtrema:
    """Minimum or maximum of any range of a sequence, in constant time for each range.

    Args:
        values: The sequence.
        ufunc: ``np.minimum`` or ``np.maximum``.
    """

    def __init__(self, values: Values, ufunc: np.ufunc) -> None:
        self._ufunc = ufunc
        self._levels = np.tile(values, (max(1, len(values).bit_length()), 1))  # level l: extremum of 2^l values from each on
        for level in range(1, len(self._levels)):
            width = 1 << (level - 1)
            previous = self._levels[level - 1]
            self._levels[level, : len(values) - width] = ufunc(previous[:-width], previous[width:])

    def __call__(self, starts: Indices, ends: Indices) -> Values:
        """Return the extremum of each range ``start`` … ``end`` − 1, which must not be empty."""
        level = np.frexp(ends - starts)[1] - 1
        return self._ufunc(self._levels[level, starts], self._levels[level, ends - (1 << level)])  # type: ignore[no-any-return]


def prefix_sums(values: Sequence[float]) -> Values:
    """Return the sums of the first 0, 1, 2, … values."""
    return np.array([0.0, *accumulate(values)])


def partition_of(sizes: Sequence[int]) -> list[range]:
    """Return the contiguous ranges that have these sizes."""
    return [range(start, end) for start, end in pairwise(accumulate(sizes, initial=0))]
