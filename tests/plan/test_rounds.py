"""Periodic rounds against the timetable that they abbreviate."""

from collections.abc import Iterator
from itertools import groupby

import pytest

from petra.plan.rounds import periodic_rounds
from petra.plan.schedule import timetable, training_order
from tests.plan.test_schedule import orders, random_case


@pytest.mark.parametrize("seed", range(60))
def test_rounds_match_the_timetable_at_any_length(seed: int) -> None:
    made, stages, k, _, start = random_case(seed)
    between, delays = made.boundary_delays(stages - 1)[: stages - 1], made.delays(stages, k)
    period = k if made.flush else 1
    for microbatches in (0, 1, 23, 97, 150):
        found = periodic_rounds(
            lambda a, b: [training_order(delay, a, b, k if made.flush else None) for delay in delays],
            between,
            start,
            start + microbatches,
            period=period,
            fill=2 * max(delays) + stages,
        )
        steps = timetable(orders(made, stages, k, microbatches, start), between)
        grouped = [[(s.stage, s.op, s.microbatch) for s in round_] for _, round_ in groupby(steps, lambda step: step.round)]
        assert [[(s.stage, s.op, s.microbatch + offset) for s in round_] for offset, round_ in found] == grouped
    assert len(found.first) + len(found.body) + len(found.last) < len(grouped), "the body is not repeated"
    for dropped in range(min(found.repeats, 4) + 1):
        steps = timetable(orders(made, stages, k, 150 - dropped * period, start), between)
        grouped = [[(s.stage, s.op, s.microbatch) for s in round_] for _, round_ in groupby(steps, lambda step: step.round)]
        first = iter([True])

        def drop_once(remaining: int, first: Iterator[bool] = first, dropped: int = dropped) -> int:
            return remaining - dropped if next(first, False) else remaining

        shortened = found.iterate(drop_once)
        assert [[(s.stage, s.op, s.microbatch + offset) for s in round_] for offset, round_ in shortened] == grouped
