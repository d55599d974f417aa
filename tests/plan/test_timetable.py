"""Rounds of the timetable against a plain search step by step, which finds deadlocks."""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby, product
from random import Random

import pytest

from petra import ConfigError, Keep, Method, ScheduleError
from petra.plan.timetable import Op, PeriodicRounds, Step, Timetable, check_training, evaluation_rounds, in_flight, training_rounds

F, B = Op.FORWARD, Op.BACKWARD
Grouped = list[list[tuple[int, Op, int]]]


def method(delay: int | tuple[int, ...], flush: bool = False, fill: bool = False) -> Method:
    return Method("test", delay, Keep.NOTHING, flush=flush, fill=fill)


def training_order(delay: int, start: int, stop: int, flush_every: int | None = None) -> Iterator[tuple[Op, int]]:
    """Yield the steps of one stage for microbatches ``start`` … ``stop`` − 1.

    The stage runs ``delay`` forwards, then one forward and one backward in turn, then the remaining backwards.

    Args:
        delay: Delay τ of the stage.
        flush_every: Drain the pipeline at each multiple of this number of microbatches. Methods with exact gradients use k.
    """
    while start < stop:
        end = stop if flush_every is None else min(stop, (start // flush_every + 1) * flush_every)
        warm_up = min(delay, end - start)
        for m in range(start, start + warm_up):
            yield Op.FORWARD, m
        for m in range(start + warm_up, end):
            yield Op.FORWARD, m
            yield Op.BACKWARD, m - warm_up
        for m in range(end - warm_up, end):
            yield Op.BACKWARD, m
        start = end


def orders(made: Method, stages: int, k: int, microbatches: int, start: int = 0) -> list[list[tuple[Op, int]]]:
    flush = k if made.flush else None
    return [list(training_order(delay, start, start + microbatches, flush)) for delay in made.delays(stages, k)]


def searched(orders: Sequence[Sequence[tuple[Op, int]]], between: Sequence[int]) -> Iterator[Step]:
    """Merge orders round by round: each stage runs its next step in the first round in which the rules of Timetable allow it.

    A stage waits for a message until it has come, and to send until the receiver has room, as in a process of its own.
    """
    left = [deque(order) for order in orders]
    inbox: dict[tuple[Op, int], deque[int]] = {(op, j): deque() for op, j in product(Op, range(len(orders)))}  # first rounds
    forward_from, now, ended = [0] * len(orders), 0, 0
    while any(left):
        ran: set[int] = set()
        for j in [*range(len(orders))] * 2 * len(orders):  # what a stage uses makes room, so that its neighbour can run as well
            if j in ran or not left[j]:
                continue
            (op, m), step = left[j][0], 1 if left[j][0][0] is F else -1
            source, target = j - step, j + step
            waits = 0 <= source < len(orders) and not (inbox[op, j] and inbox[op, j][0] <= now)
            full = 0 <= target < len(orders) and len(inbox[op, target]) > between[min(j, target)]
            if waits or full or (op is F and forward_from[j] > now):
                continue
            if 0 <= source < len(orders):
                inbox[op, j].popleft()
            if 0 <= target < len(orders):
                inbox[op, target].append(now + max(1, between[min(j, target)]))
            forward_from[j] = now + 2 if op is F else forward_from[j]
            left[j].popleft()
            ran.add(j)
            yield Step(now, j, op, m)
        now, ended = now + 1, now if ran else ended
        assert now - ended <= 2 + max([1, *between]), "the orders deadlock"


def test_delays_of_boundaries_and_fill() -> None:
    assert method((0, 3, 1)).delays(4, 1) == (4, 4, 1, 0)
    assert method(0, flush=True, fill=True).delays(3, 5) == (4, 4, 4)
    with pytest.raises(ConfigError, match="3 delays"):
        method((0, 3, 1)).delays(3, 1)
    with pytest.raises(ConfigError, match=r"method\.delay"):
        method(-1)
    with pytest.raises(ConfigError, match=r"method\.fill"):
        method(0, fill=True)


@pytest.mark.parametrize(("delay", "k", "flush"), [(0, 1, False), (4, 1, False), (6, 4, False), (5, 3, True), (2, 4, True)])
def test_in_flight_and_staleness_match_the_order(delay: int, k: int, flush: bool) -> None:
    stored, most, updates, staleness = dict[int, int](), 0, 0, []
    for op, m in training_order(delay, 0, 40 * k, k if flush else None):
        if op is F:
            stored[m] = updates
            most = max(most, len(stored))
            continue
        if 10 * k <= m < 30 * k:
            staleness.append(updates - stored[m])
        del stored[m]
        updates += (m + 1) % k == 0
    assert in_flight(delay, k, flush) == most
    assert Method("x", delay, Keep.NOTHING, flush=flush).staleness(delay, k) == pytest.approx(sum(staleness) / len(staleness))


def random_case(seed: int) -> tuple[Method, int, int, int, int]:
    random = Random(seed)
    stages = random.randint(1, 9)
    delay = random.choice([0, 1, 2, 3, tuple(random.randint(0, 5) for _ in range(stages - 1))])
    flush = random.random() < 0.3
    made = method(delay, flush, fill=flush and random.random() < 0.5)
    return made, stages, random.randint(1, 5), random.randint(0, 40), random.randint(0, 9)


def test_accumulation_bounds_the_updates_between_forward_and_backward() -> None:
    """Counts updates in the schedule itself: at most ⌈τ / k⌉ come between F and B of any microbatch."""
    for k, bound in ((7, 1), (4, 2)):
        made = Method("paci", 1, Keep.GRAPH, max_updates=bound)
        tau = made.delays(8, k)[0]
        crossed = [len([b for b in range(m - tau, m) if b >= 0 and (b + 1) % k == 0]) for m in range(100)]
        assert max(crossed) == bound
        with pytest.raises(ConfigError, match=f"k: expected an integer >= {k} with method.max_updates={bound}, got {k - 1}"):
            made.delays(8, k - 1)
    with pytest.raises(ConfigError, match=r"method\.max_updates: expected null or an integer >= 1, got 0"):
        Method("paci", 1, Keep.GRAPH, max_updates=0)


def expected_rounds(steps: Iterable[Step]) -> Grouped:
    return [sorted((s.stage, s.op, s.microbatch) for s in round_) for _, round_ in groupby(steps, lambda step: step.round)]


def found_rounds(rounds: Iterable[tuple[int, list[Step]]]) -> Grouped:
    return [sorted((s.stage, s.op, s.microbatch + offset) for s in round_) for offset, round_ in rounds]


@pytest.mark.parametrize("seed", range(60))
def test_rounds_match_the_timetable_at_any_length(seed: int) -> None:
    made, stages, k, _, start = random_case(seed)
    between, delays = made.boundary_delays(stages - 1), made.delays(stages, k)
    flush = k if made.flush else None

    def rounds(microbatches: int) -> PeriodicRounds[list[Step]]:
        return training_rounds(delays, between, start, start + microbatches, flush)

    for microbatches in (0, 1, 23, 97, 150):
        steps = list(searched(orders(made, stages, k, microbatches, start), between))
        found = rounds(microbatches)
        assert found_rounds(found) == expected_rounds(steps)
        numbers = [round_.round for round_ in Timetable(delays, between, start, start + microbatches, flush)]
        assert numbers == sorted({step.round for step in steps})
    assert found.repeats > 0, "the body is not repeated"
    for dropped in range(min(found.repeats, 4) + 1):
        first = iter([True])

        def drop_once(remaining: int, first: Iterator[bool] = first, dropped: int = dropped) -> int:
            return remaining - dropped if next(first, False) else remaining

        steps = searched(orders(made, stages, k, 150 - dropped * found.period, start), between)
        assert found_rounds(rounds(150).iterate(drop_once)) == expected_rounds(steps)


@pytest.mark.parametrize("stages", [1, 4, 7])
def test_evaluation(stages: int) -> None:
    for microbatches in (0, 1, 40):
        steps = searched([[(F, m) for m in range(microbatches)]] * stages, [2] * (stages - 1))
        assert found_rounds(evaluation_rounds([2] * (stages - 1), microbatches)) == expected_rounds(steps)


def test_rounds_of_the_steady_state_are_converted_once() -> None:
    converted = []
    for _ in training_rounds([2, 0], [2], 0, 10_000).converted(lambda round_: converted.append(round_)):
        pass
    assert len(converted) < 40


def test_delays_that_deadlock_are_refused() -> None:
    """Stage 2 runs three forwards before its first backward, but stage 1 has to wait for that backward after one forward."""
    with pytest.raises(ScheduleError, match="delays of stages 1 and 2: expected a difference of 0 to 1, got 0 and 2"):
        check_training([0, 2], [1])
    with pytest.raises(ScheduleError, match="deadlocks"):
        list(Timetable([0, 2], [1], 0, 9))
    with pytest.raises(AssertionError, match="deadlock"):
        list(searched([list(training_order(delay, 0, 9)) for delay in (0, 2)], [1]))
