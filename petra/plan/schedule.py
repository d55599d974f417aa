"""The static order of forwards and backwards as plain data, the timetable that executes and checks it, and its rounds.

Four stages, d = 2 (PETRA), one column per tick, F before B in each; stage j runs τ_j = 2(4 − j) forwards ahead::

    stage 1   F0  F1  F2  F3  F4  F5  F6 B0  F7 B1
    stage 2       F0  F1  F2  F3  F4 B0  F5 B1  F6 B2
    stage 3           F0  F1  F2 B0  F3 B1  F4 B2  F5 B3
    stage 4               F0 B0  F1 B1  F2 B2  F3 B3  F4 B4
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from heapq import heappop, heappush
from itertools import groupby
from typing import Generic, NamedTuple, TypeVar

from petra.errors import ScheduleError


class Op(StrEnum):
    FORWARD = "F"
    BACKWARD = "B"


class Step(NamedTuple):
    """One piece of work of one stage, in the round (half a tick) in which the timetable puts it."""

    round: int
    stage: int
    op: Op
    microbatch: int


def training_order(delay: int, start: int, stop: int, flush_every: int | None = None) -> Iterator[tuple[Op, int]]:
    """One stage's order for microbatches start … stop − 1: ``delay`` forwards ahead, then F and B in turn, then the last B's.

    Args:
        delay: τ of the stage.
        flush_every: drain at every multiple of this many microbatches (k, for methods with exact gradients).
    """
    while start < stop:
        end = stop if flush_every is None else min(stop, (start // flush_every + 1) * flush_every)
        ahead = min(delay, end - start)
        for m in range(start, start + ahead):
            yield Op.FORWARD, m
        for m in range(start + ahead, end):
            yield Op.FORWARD, m
            yield Op.BACKWARD, m - ahead
        for m in range(end - ahead, end):
            yield Op.BACKWARD, m
        start = end


def training_orders(delays: Sequence[int], start: int, stop: int, flush_every: int | None = None) -> list[Iterator[tuple[Op, int]]]:
    """The order of every stage, from their τ."""
    return [training_order(delay, start, stop, flush_every) for delay in delays]


def evaluation_order(start: int, stop: int) -> Iterator[tuple[Op, int]]:
    """Forwards only."""
    return ((Op.FORWARD, m) for m in range(start, stop))


def timetable(orders: Sequence[Iterable[tuple[Op, int]]], boundary_delays: Sequence[int]) -> Iterator[Step]:
    """All stages' work in one global order that respects every dependency, or an error if there is none.

    A stage does at most one step a round. What it sends is taken in max(1, d) rounds later at the earliest, so that at d = 2 all
    stages forward in the same rounds and a message has the other half of the tick to travel. At most d + 1 messages wait at a
    boundary in each direction: what a transport has to hold, and what a sender may rely on. Any set of processes that each walk
    their stages' part of this order can't deadlock, since the first step not done never waits for a later one.

    Args:
        orders: for each stage its steps in order.
        boundary_delays: d for each boundary, len(orders) − 1 of them.

    Yields:
        Steps in the order of their rounds, stages ascending within a round.

    Raises:
        ScheduleError: the orders deadlock, or a backward comes before its forward; the text says what each stage waits for.
    """
    stages = len(orders)
    pending = [iter(order) for order in orders]
    heads = [next(order, None) for order in pending]
    free_from = [0] * stages
    forward_from = [0] * stages
    in_flight: list[set[int]] = [set() for _ in range(stages)]
    # Per operation and receiving stage: the microbatches sent to it and not yet taken in, each with the first round for its use.
    inbox: dict[Op, list[deque[tuple[int, int]]]] = {op: [deque() for _ in orders] for op in Op}
    queue: list[tuple[int, int]] = []
    queued = [False] * stages

    def enqueue(stage: int) -> None:
        """Puts a stage's next step into the queue if its message is on the way and what it sends has room."""
        head = heads[stage]
        if head is None or queued[stage]:
            return
        op, m = head
        earliest = free_from[stage]
        if op is Op.FORWARD:
            from_outside, receiver = stage == 0, stage + 1
            earliest = max(earliest, forward_from[stage])
        else:
            from_outside, receiver = stage == stages - 1, stage - 1
            if m not in in_flight[stage]:
                raise ScheduleError(f"stage {stage + 1}: backward of microbatch {m} comes before its forward")
        if not from_outside:
            messages = inbox[op][stage]
            if not messages or messages[0][0] != m:
                return
            earliest = max(earliest, messages[0][1])
        if 0 <= receiver < stages and len(inbox[op][receiver]) > boundary_delays[min(stage, receiver)]:
            return
        heappush(queue, (earliest, stage))
        queued[stage] = True

    for stage in range(stages):
        enqueue(stage)
    now = 0
    while queue:
        earliest, stage = heappop(queue)
        queued[stage] = False
        now = max(now, earliest)
        op, m = heads[stage]  # type: ignore[misc]
        yield Step(now, stage, op, m)
        if inbox[op][stage]:
            inbox[op][stage].popleft()
        if op is Op.FORWARD:
            in_flight[stage].add(m)
            forward_from[stage] = now + 2
            receiver = stage + 1
        else:
            in_flight[stage].remove(m)
            receiver = stage - 1
        if 0 <= receiver < stages:
            inbox[op][receiver].append((m, now + max(1, boundary_delays[min(stage, receiver)])))
        free_from[stage] = now + 1
        heads[stage] = next(pending[stage], None)
        for neighbour in (stage, stage - 1, stage + 1):
            if 0 <= neighbour < stages:
                enqueue(neighbour)
    stuck = [f"stage {j + 1} waits to do {head[0]}{head[1]}" for j, head in enumerate(heads) if head is not None]
    if stuck:
        raise ScheduleError("the order deadlocks: " + ", ".join(stuck))


def in_flight(delay: int, k: int, flush: bool) -> int:
    """Return the maximum number of microbatches between forward and backward at a stage of delay τ, the current one included."""
    return min(delay + 1, k) if flush else delay + 1


def check(orders: Sequence[Iterable[tuple[Op, int]]], boundary_delays: Sequence[int]) -> None:
    """Raises :class:`ScheduleError` unless every step of the orders can be done (see :func:`timetable`)."""
    for _ in timetable(orders, boundary_delays):
        pass


Orders = Callable[[int, int], Sequence[Iterable[tuple[Op, int]]]]
"""(start, stop) → each stage's order for microbatches start … stop − 1."""
R = TypeVar("R")
S = TypeVar("S")


@dataclass(frozen=True)
class Rounds(Generic[R]):
    """The rounds of a timetable: head, a body that repeats, and tail. Iterating over them costs the same at any number of stages.

    Yields each round with the number to be added to its microbatches.
    """

    head: Sequence[R]
    body: Sequence[R]
    tail: Sequence[R]
    repeats: int
    period: int
    """Microbatches of one body."""
    start: int

    def __iter__(self) -> Iterator[tuple[int, R]]:
        return self.cut(lambda left: left)

    def cut(self, left: Callable[[int], int]) -> Iterator[tuple[int, R]]:
        """As iterating, but ``left`` says before each body how many are to come, of so many: one less is one period less."""
        shift, repeats = self.start, self.repeats
        for round_ in self.head:
            yield shift, round_
        while repeats and (repeats := left(repeats)):
            for round_ in self.body:
                yield shift, round_
            shift += self.period
            repeats -= 1
        for round_ in self.tail:
            yield shift, round_

    def map(self, plan: Callable[[R], S]) -> Rounds[S]:
        """The same with each round replaced by what ``plan`` makes of it."""
        head, body, tail = ([plan(round_) for round_ in part] for part in (self.head, self.body, self.tail))
        return Rounds(head, body, tail, self.repeats, self.period, self.start)


def rounds(
    orders: Orders,
    boundary_delays: Sequence[int],
    start: int,
    stop: int,
    *,
    period: int,
    warm_up: int,
) -> Rounds[list[Step]]:
    """The steps of :func:`timetable` for microbatches start … stop − 1, grouped by round.

    Between the filling of the pipeline and its drain the timetable repeats itself, so what one more period adds is the difference
    between two short timetables.

    Args:
        period: microbatches after which the orders repeat themselves: 1, or k with a flush every k.
        warm_up: microbatches by which the pipeline is full at the latest.
    """

    def grouped(microbatches: int) -> list[list[Step]]:
        steps = timetable(orders(phase, phase + microbatches), boundary_delays)
        return [list(round_) for _, round_ in groupby(steps, key=lambda step: step.round)]

    phase, microbatches = start % period, stop - start
    short = microbatches % period + period * (2 + warm_up // period)
    if microbatches <= short + period:
        return Rounds(grouped(microbatches), (), (), 0, period, start - phase)
    without, with_ = grouped(short), grouped(short + period)
    same = next((i for i, (a, b) in enumerate(zip(without, with_, strict=False)) if a != b), len(without))
    added = len(with_) - len(without)
    head, body, tail = without[:same], with_[same : same + added], without[same:]
    later = [[(step.stage, step.op, step.microbatch) for step in round_] for round_ in with_[same + added :]]
    assert later == [[(step.stage, step.op, step.microbatch + period) for step in round_] for round_ in tail]
    return Rounds(head, body, tail, (microbatches - short) // period, period, start - phase)
