from collections.abc import Callable
from functools import cache
from itertools import accumulate, combinations, pairwise
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from petra import METHODS, ConfigError
from petra.cost_model.autotune import choose_delays
from petra.cost_model.costs import StageCost
from petra.cost_model.machines import Link
from petra.plan.partition import balanced_partition, best_partition
from petra.plan.transport import choose_transport, simulated_transport


@pytest.mark.parametrize("seed", range(40))
def test_no_partition_has_a_cheaper_worst_part_or_second_worst_and_so_on(seed: int) -> None:
    random = Random(seed)
    costs = [random.choice([0, 1, 2, random.randint(0, 10)]) for _ in range(random.randint(1, 9))]
    parts = random.randint(1, len(costs))
    found = balanced_partition(costs, parts)
    assert [i for part in found for i in part] == list(range(len(costs)))
    assert all(found)
    assert len(found) == parts
    with pytest.raises(ConfigError, match=r"parts: expected an integer from 1 to \d \(the number of items\), got 10"):
        balanced_partition(costs, 10)

    def descending(bounds: tuple[int, ...]) -> list[int]:
        return sorted((sum(costs[a:b]) for a, b in pairwise((0, *bounds, len(costs)))), reverse=True)

    # The first of the best ones in the order of bounds has the smallest first range.
    best = min(combinations(range(1, len(costs)), parts - 1), key=descending)
    assert [part.stop for part in found[:-1]] == list(best)


def smallest_first_ranges(items: int, parts: int, cost: Callable[[int, int, int], float]) -> list[range] | None:
    """Solve the problem by trying all ends of the first part, then all of the second, and so on. None if no partition is finite."""

    @cache
    def solve(start: int, part: int) -> tuple[float, int]:
        if part == parts:
            return (0.0 if start == items else float("inf")), start
        ends = range(start + 1, items + 1)
        return min(((max(cost(start, end, part), solve(end, part + 1)[0]), end) for end in ends), default=(float("inf"), start))

    ends = [0]
    for part in range(parts):
        ends.append(solve(ends[-1], part)[1])
    return [range(a, b) for a, b in pairwise(ends)] if solve(0, 0)[0] < float("inf") else None


@given(
    st.lists(st.sampled_from([0.0, 1.0, 2.0, 10.0]) | st.floats(0, 9), min_size=1, max_size=9),
    st.lists(st.tuples(st.sampled_from([0.3, 1.0, 2.0]), st.sampled_from([1, 3, 99])), min_size=1, max_size=9),
)
def test_best_partition_against_all_partitions(costs: list[float], machines: list[tuple[float, int]]) -> None:
    """Parts have a speed and a largest number of items. The partition is the same one, also if several are optimal."""
    parts = min(len(costs), len(machines))
    total = [0.0, *accumulate(costs)]

    def cost(start: int, end: int, part: int) -> float:
        speed, most = machines[part]
        return (total[end] - total[start]) / speed if end - start <= most else float("inf")

    def range_costs(starts: NDArray[np.int64], ends: NDArray[np.int64], part: int) -> NDArray[np.float64]:
        return np.array([cost(start, end, part) for start, end in zip(starts, ends, strict=True)])

    expected = smallest_first_ranges(len(costs), parts, cost)
    if expected is None:
        with pytest.raises(ConfigError, match="no partition into"):
            best_partition(len(costs), parts, range_costs)
    else:
        assert best_partition(len(costs), parts, range_costs) == expected


@pytest.mark.parametrize("delay", [0, 1, 2, 4])
def test_auto_never_selects_edge_on_gpus_or_in_many_processes(delay: int) -> None:
    assert choose_transport("auto", 3, [delay] * 2, "cuda") == simulated_transport("auto", [delay] * 2, "cuda") == "lockstep"
    assert choose_transport("auto", 3, [delay] * 2, "cpu") == ("lockstep" if delay == 2 else "edge")
    assert choose_transport("auto", 1, [delay], "cuda") == "local"
    assert choose_transport("auto", 65, [delay] * 64) == simulated_transport("auto", [delay] * 64) == "lockstep"
    with pytest.raises(ConfigError, match="transport: expected auto or lockstep in 66 processes, got edge"):
        choose_transport("edge", 3, [delay] * 2, world=66)
    for named in ("edge", "lockstep"):
        assert choose_transport(named, 3, [delay] * 2, "cuda") == simulated_transport(named, [delay] * 2, "cuda") == named


def test_delays_are_chosen_for_the_transport_of_the_device() -> None:
    """Lockstep needs d = 2 at one more boundary than edge to hide short messages."""
    costs = [StageCost(1.0, 3.0, forward_bytes=1, backward_bytes=2)] * 4
    chosen = {
        kind: choose_delays(costs, METHODS["petra"], 4, link=Link(bandwidth=64.0, latency=0.0), device_type=kind)
        for kind in ("cpu", "cuda")
    }
    assert chosen["cuda"] == choose_delays(costs, METHODS["petra"], 4, link=Link(bandwidth=64.0, latency=0.0), transport="lockstep")
    assert chosen["cuda"] != chosen["cpu"]
