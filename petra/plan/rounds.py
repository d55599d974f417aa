"""A timetable grouped by rounds. Its size doesn't depend on the number of microbatches, because the steady state repeats."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Generic, TypeVar

from petra.plan.schedule import Op, Step, timetable

Orders = Callable[[int, int], Sequence[Iterable[tuple[Op, int]]]]
"""Function (start, stop) → order of each stage for microbatches ``start`` … ``stop`` − 1."""
T = TypeVar("T")
U = TypeVar("U")


@dataclass(frozen=True)
class PeriodicRounds(Generic[T]):
    """Rounds of a timetable: ``first`` once, then ``body`` ``repeats`` times, then ``last`` once.

    Iteration yields ``(offset, round)``. The offset must be added to the microbatch numbers of the round.

    Attributes:
        first: Rounds that fill the pipeline.
        body: Rounds of one period of the steady state.
        last: Rounds that drain the pipeline.
        repeats: Number of repetitions of ``body``.
        period: Microbatches in one body.
        start: Offset of the first round.
    """

    first: Sequence[T]
    body: Sequence[T]
    last: Sequence[T]
    repeats: int
    period: int
    start: int

    def __iter__(self) -> Iterator[tuple[int, T]]:
        return self.iterate(lambda remaining: remaining)

    def iterate(self, choose_remaining: Callable[[int], int]) -> Iterator[tuple[int, T]]:
        """Iterate, but run fewer periods if ``choose_remaining`` asks for it. This is how a run stops early.

        Args:
            choose_remaining: Called before each body with the number of periods left. Returns how many of them to run.
        """
        offset, remaining = self.start, self.repeats
        for round_ in self.first:
            yield offset, round_
        while remaining and (remaining := choose_remaining(remaining)):
            for round_ in self.body:
                yield offset, round_
            offset += self.period
            remaining -= 1
        for round_ in self.last:
            yield offset, round_

    def map(self, convert: Callable[[T], U]) -> PeriodicRounds[U]:
        """Return the same sequence with ``convert`` applied to each round."""
        first, body, last = ([convert(round_) for round_ in part] for part in (self.first, self.body, self.last))
        return PeriodicRounds(first, body, last, self.repeats, self.period, self.start)


def periodic_rounds(
    orders: Orders, boundary_delays: Sequence[int], start: int, stop: int, *, period: int, fill: int
) -> PeriodicRounds[list[Step]]:
    """Group the steps of :func:`petra.plan.schedule.timetable` for microbatches ``start`` … ``stop`` − 1 by round.

    The cost doesn't depend on the number of microbatches: only two short timetables are computed, which differ by one period. The
    rounds that the longer one adds are the body.

    Args:
        period: Microbatches after which the orders repeat: 1, or k if the pipeline drains every k microbatches.
        fill: Number of microbatches after which the pipeline has reached its steady state.
    """
    phase, microbatches = start % period, stop - start

    def grouped(count: int) -> list[list[Step]]:
        steps = timetable(orders(phase, phase + count), boundary_delays)
        return [list(round_) for _, round_ in groupby(steps, key=lambda step: step.round)]

    short = microbatches % period + period * (2 + fill // period)
    if microbatches <= short + period:
        return PeriodicRounds(grouped(microbatches), (), (), 0, period, start - phase)
    shorter, longer = grouped(short), grouped(short + period)
    same = next((i for i, (a, b) in enumerate(zip(shorter, longer, strict=False)) if a != b), len(shorter))
    added = len(longer) - len(shorter)
    first, body, last = shorter[:same], longer[same : same + added], shorter[same:]
    longer_last = [[(step.stage, step.op, step.microbatch) for step in round_] for round_ in longer[same + added :]]
    assert longer_last == [[(step.stage, step.op, step.microbatch + period) for step in round_] for round_ in last]
    return PeriodicRounds(first, body, last, (microbatches - short) // period, period, start - phase)
