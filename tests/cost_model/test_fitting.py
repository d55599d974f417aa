"""The search for a partition whose counted memory fits: partitions are pairs of sizes, and the account is a function of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from petra import ConfigError
from petra.cost_model.autotune import search_within
from petra.cost_model.memory import PredictedMemory
from petra.errors import invalid

Pair = tuple[float, float]
SMALLEST = 10.0


class Partitions:
    """Finds the largest sizes within the limits."""

    def __init__(self) -> None:
        self.searches = 0

    def search(self, limits: Sequence[float]) -> Pair:
        self.searches += 1
        if min(limits) < SMALLEST:
            raise invalid("size", f"at least {SMALLEST}", min(limits))
        return limits[0], limits[1]


def fitted(need: Callable[[float], float], limits: Pair) -> tuple[Pair, Partitions]:
    found = Partitions()

    def count(pair: Pair) -> list[PredictedMemory]:
        return [PredictedMemory(0, 0, 0, int(need(size)), 0, 0) for size in pair]

    pair, memory = search_within(limits, found.search, lambda pair: pair, count, "memory", "device")
    assert [counted.total for counted in memory] == [int(need(size)) for size in pair]
    return pair, found


def test_estimates_that_hold_need_one_search() -> None:
    pair, partitions = fitted(lambda size: 0.9 * size, (100.0, 60.0))
    assert (pair, partitions.searches) == ((100.0, 60.0), 1)


def test_the_estimate_becomes_smaller_by_the_excess() -> None:
    assert fitted(lambda size: size + 30, (100.0, 60.0))[0] == (70.0, 30.0)
    assert fitted(lambda size: 1.5 * size, (100.0, 60.0))[0] == (50.0, 30.0)
    assert fitted(lambda size: size + 30 * (size > 90), (100.0, 60.0))[0] == (70.0, 60.0)


def test_limits_that_nothing_meets() -> None:
    with pytest.raises(ConfigError, match=r"memory: expected at least 1\.12e-07 GB for device 2, got 6e-08 GB"):
        fitted(lambda size: size + 52, (100.0, 60.0))
    with pytest.raises(ConfigError, match=r"size: expected at least 10\.0, got 6\.0"):
        fitted(lambda size: size, (100.0, 6.0))
