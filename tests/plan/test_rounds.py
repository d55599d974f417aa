"""Rounds computed for all stages at once against the timetable, which merges any orders step by step."""

from collections.abc import Iterator
from itertools import groupby

import pytest

from petra import ScheduleError
from petra.plan.rounds import PeriodicRounds, Timetable, evaluation_rounds, training_rounds
from petra.plan.schedule import Op, Step, check_training, evaluation_order, timetable, training_order
from tests.plan.test_schedule import orders, random_case

Grouped = list[list[tuple[int, Op, int]]]


def expected_rounds(steps: Iterator[Step]) -> Grouped:
    return [sorted((s.stage, s.op, s.microbatch) for s in round_) for _, round_ in groupby(steps, lambda step: step.round)]


def found_rounds(rounds: Iterator[tuple[int, list[Step]]]) -> Grouped:
    return [sorted((s.stage, s.op, s.microbatch + offset) for s in round_) for offset, round_ in rounds]


@pytest.mark.parametrize("seed", range(60))
def test_rounds_match_the_timetable_at_any_length(seed: int) -> None:
    made, stages, k, _, start = random_case(seed)
    between, delays = made.boundary_delays(stages - 1)[: stages - 1], made.delays(stages, k)
    flush = k if made.flush else None

    def rounds(microbatches: int) -> PeriodicRounds[list[Step]]:
        return training_rounds(delays, between, start, start + microbatches, flush)

    for microbatches in (0, 1, 23, 97, 150):
        steps = list(timetable(orders(made, stages, k, microbatches, start), between))
        found = rounds(microbatches)
        assert found_rounds(iter(found)) == expected_rounds(iter(steps))
        numbers = [round_.round for round_ in Timetable(delays, between, start, start + microbatches, flush)]
        assert numbers == sorted({step.round for step in steps})
    assert found.repeats > 0, "the body is not repeated"
    for dropped in range(min(found.repeats, 4) + 1):
        first = iter([True])

        def drop_once(remaining: int, first: Iterator[bool] = first, dropped: int = dropped) -> int:
            return remaining - dropped if next(first, False) else remaining

        steps = timetable(orders(made, stages, k, 150 - dropped * found.period, start), between)
        assert found_rounds(rounds(150).iterate(drop_once)) == expected_rounds(steps)


@pytest.mark.parametrize("seed", range(20))
def test_a_step_comes_after_those_that_make_room_for_its_message(seed: int) -> None:
    """Processes that own several stages run them in this order, so a sender must not come before the receiver that it waits for."""
    made, stages, k, microbatches, start = random_case(seed)
    between, delays = made.boundary_delays(stages - 1)[: stages - 1], made.delays(stages, k)
    waiting: dict[tuple[Op, int], int] = {(op, j): 0 for op in Op for j in range(stages)}
    for _, round_ in training_rounds(delays, between, start, start + microbatches, k if made.flush else None):
        for step in round_:
            source, target = (step.stage - 1, step.stage + 1) if step.op is Op.FORWARD else (step.stage + 1, step.stage - 1)
            if 0 <= source < stages:
                waiting[step.op, step.stage] -= 1
            if 0 <= target < stages:
                assert waiting[step.op, target] <= between[min(step.stage, target)]
                waiting[step.op, target] += 1
    assert set(waiting.values()) == {0}


@pytest.mark.parametrize("stages", [1, 4, 7])
def test_evaluation(stages: int) -> None:
    for microbatches in (0, 1, 40):
        steps = timetable([evaluation_order(0, microbatches) for _ in range(stages)], [2] * (stages - 1))
        assert found_rounds(iter(evaluation_rounds([2] * (stages - 1), microbatches))) == expected_rounds(steps)


def test_rounds_of_the_steady_state_are_converted_once() -> None:
    converted = []
    for _ in training_rounds([2, 0], [2], 0, 10_000).map(lambda round_: converted.append(round_)):
        pass
    assert len(converted) < 40


@pytest.mark.parametrize("seed", range(60))
def test_training_orders_do_not_deadlock(seed: int) -> None:
    made, stages, k, microbatches, start = random_case(seed)
    between = made.boundary_delays(stages - 1)[: stages - 1]
    check_training(made.delays(stages, k), between)
    list(timetable(orders(made, stages, k, microbatches, start), between))


def test_delays_that_deadlock_are_refused() -> None:
    """Stage 2 runs three forwards before its first backward, but stage 1 has to wait for that backward after one forward."""
    with pytest.raises(ScheduleError, match="delays of stages 1 and 2: expected a difference of 0 to 1, got 0 and 2"):
        check_training([0, 2], [1])
    with pytest.raises(ScheduleError, match="deadlocks"):
        list(timetable([training_order(delay, 0, 9) for delay in (0, 2)], [1]))
    with pytest.raises(ScheduleError, match="deadlocks"):
        list(Timetable([0, 2], [1], 0, 9))
