"""The timetable: in which round each stage runs which forward and backward. It is what the executor runs.

Example: four stages with d = 2 (PETRA). Each column is one tick, which is two rounds: F in the first, B in the second. Stage j
starts with τ_j = 2(4 − j) forwards::

    stage 1   F0  F1  F2  F3  F4  F5  F6 B0  F7 B1
    stage 2       F0  F1  F2  F3  F4 B0  F5 B1  F6 B2
    stage 3           F0  F1  F2 B0  F3 B1  F4 B2  F5 B3
    stage 4               F0 B0  F1 B1  F2 B2  F3 B3  F4 B4

:class:`Timetable` computes the rounds, and :class:`PeriodicRounds` repeats those of the steady state. Predictions read the same
rounds (:mod:`petra.cost_model.event_graph`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from enum import StrEnum
from itertools import pairwise
from typing import Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from petra.errors import ScheduleError, invalid

T = TypeVar("T")
U = TypeVar("U")
Numbers = NDArray[np.int64]


class Op(StrEnum):
    """Kind of a step."""

    FORWARD = "F"
    BACKWARD = "B"


class Step(NamedTuple):
    """Forward or backward of one microbatch on one stage, in a round (half a tick) of the timetable."""

    round: int
    stage: int
    op: Op
    microbatch: int


def in_flight(delay: int, k: int, flush: bool) -> int:
    """Return the largest number of microbatches between forward and backward at a stage, including the one it works on.

    Args:
        delay: Delay τ of the stage.
        k: Microbatches per update.
        flush: Whether the pipeline drains before each update.
    """
    return min(delay + 1, k) if flush else delay + 1


def check_training(delays: Sequence[int], boundary_delays: Sequence[int]) -> None:
    """Check that the orders of :class:`Timetable` can be executed, for any number of microbatches and any flush.

    Sufficient condition: at each boundary, the delay τ falls by 0 to d. Let f_j(n) be the F of microbatch n + τ_j at stage j, and
    b_j(n) the B of microbatch n. In the order of the stage, f_j(n) comes directly before b_j(n). A step with index n waits for
    steps with a smaller index. With the same index, f_j waits only for f_(j−1), and b_j for f_j and b_(j+1), which form no cycle.
    A message that waits for room waits for a step with a smaller index. Starts, ends and flushes only remove steps.

    Args:
        delays: Delay τ of each stage.
        boundary_delays: Delay d of each boundary, which has room for d + 1 messages in each direction.

    Raises:
        ScheduleError: If the condition is not met.
    """
    for j, ((tau, following), d) in enumerate(zip(pairwise(delays), boundary_delays, strict=True)):
        if not 0 <= tau - following <= d:
            got = f"{tau} and {following}"
            raise invalid(f"delays of stages {j + 1} and {j + 2}", f"a difference of 0 to {d}", got, ScheduleError)


class Round(NamedTuple):
    """The steps of one round, as arrays with one entry per step.

    A step comes after all steps of the round that make room for its message.

    Attributes:
        round: Number of the round.
        stages: Stage of each step.
        forward: Whether each step is a forward; otherwise it is a backward.
        microbatches: Microbatch of each step.
    """

    round: int
    stages: Numbers
    forward: NDArray[np.bool_]
    microbatches: Numbers

    def steps(self) -> list[Step]:
        """Return the steps as a list."""
        columns = zip(self.stages.tolist(), self.forward.tolist(), self.microbatches.tolist(), strict=True)
        return [Step(self.round, stage, Op.FORWARD if forward else Op.BACKWARD, m) for stage, forward, m in columns]


class Timetable:
    """Computes the rounds of all stages at once, one round after the other.

    In training, each stage runs τ forwards, then one forward and one backward in turn, then the remaining backwards, and with
    ``flush_every`` again from there; in evaluation, forwards only. Rules:

    - A stage runs at most one step per round, and at most one forward in two rounds (a tick).
    - The receiver uses a message at the earliest max(1, d) rounds after the step that sent it. At d = 2, all stages therefore run
      their forwards in the same rounds, and a message has the other half of the tick to travel.
    - At most d + 1 messages wait at a boundary in each direction. Every transport provides room for that many.

    If each process runs the steps of its stages in this order, the processes can't deadlock: the first step that has not run yet
    never waits for a later one.

    Args:
        delays: Delay τ of each stage in training; None for forwards only.
        boundary_delays: Delay d of each boundary.
        start, stop: The microbatches are ``start`` … ``stop`` − 1.
        flush_every: Drain the pipeline at each multiple of this number of microbatches.
    """

    def __init__(
        self, delays: Sequence[int] | None, boundary_delays: Sequence[int], start: int, stop: int, flush_every: int | None = None
    ) -> None:
        stages = len(boundary_delays) + 1
        self._delays = None if delays is None else np.array(delays)
        self._room = np.array(boundary_delays, dtype=np.int64) + 1
        self._travel = np.maximum(1, np.array(boundary_delays, dtype=np.int64))
        self._flush = flush_every
        self.stop, self.now = stop, 0
        self.forwards, self._backwards = np.full(stages, start), np.full(stages, start)  # next microbatch of each stage
        self._free_from, self._forward_from = np.zeros(stages, np.int64), np.zeros(stages, np.int64)
        # Round in which a message can be used, by boundary and microbatch modulo the number of columns.
        self._columns = int(self._room.max(initial=1)) + 1
        self._x, self._delta = (np.zeros((stages - 1, self._columns), np.int64) for _ in range(2))

    def __iter__(self) -> Iterator[Round]:
        return self

    def __next__(self) -> Round:
        """Return the next round.

        Raises:
            ScheduleError: If the schedule deadlocks.
        """
        if self.finished:
            raise StopIteration
        forward, earliest = self._next_steps()
        ready = self._with_room(forward) & (earliest <= self.now)
        if not ready.any():
            earliest = np.where(self._with_room(forward), earliest, np.iinfo(np.int64).max)
            self.now = int(earliest.min())
            if self.now == np.iinfo(np.int64).max:
                raise ScheduleError("the schedule deadlocks")
            ready = earliest <= self.now
        ran, found = np.zeros_like(ready), []
        while ready.any():  # Messages that are used make room, so that their senders can run in the same round.
            stages = np.flatnonzero(ready)
            found.append((stages, forward[stages], np.where(forward, self.forwards, self._backwards)[stages]))
            self._run(stages, forward[stages])
            ran |= ready
            ready = self._with_room(forward) & (earliest <= self.now) & ~ran
        self.now += 1
        return Round(self.now - 1, *(np.concatenate(parts) for parts in zip(*found, strict=True)))

    @property
    def finished(self) -> bool:
        """Whether all steps have run."""
        return bool((self.forwards[-1] if self._delays is None else self._backwards[0]) >= self.stop)

    def _next_steps(self) -> tuple[NDArray[np.bool_], Numbers]:
        """Return whether the next step of each stage is a forward, and the first round in which its message can be used.

        A stage without a next step, or whose message has not been sent, gets the largest integer.
        """
        forwards, backwards = self.forwards, self._backwards
        never = np.iinfo(np.int64).max
        if self._delays is None:
            forward = np.ones(len(forwards), bool)
        else:
            end = self.stop if self._flush is None else np.minimum(self.stop, (backwards // self._flush + 1) * self._flush)
            forward = (forwards < end) & (forwards - backwards <= self._delays)
        earliest = np.where(forward, np.maximum(self._free_from, self._forward_from), self._free_from)
        earliest[np.where(forward, forwards, backwards) >= self.stop] = never
        boundary = np.arange(len(forwards) - 1)
        x = self._x[boundary, forwards[1:] % self._columns]
        x[forwards[1:] >= forwards[:-1]] = never
        earliest[1:] = np.where(forward[1:], np.maximum(earliest[1:], x), earliest[1:])
        if self._delays is not None:
            delta = self._delta[boundary, backwards[:-1] % self._columns]
            delta[backwards[:-1] >= backwards[1:]] = never
            earliest[:-1] = np.where(forward[:-1], earliest[:-1], np.maximum(earliest[:-1], delta))
        return forward, earliest

    def _with_room(self, forward: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Return whether the receiver of each stage's next message has room for it."""
        room = np.ones(len(forward), bool)
        room[:-1] = ~forward[:-1] | (self.forwards[:-1] - self.forwards[1:] < self._room)
        room[1:] &= forward[1:] | (self._backwards[1:] - self._backwards[:-1] < self._room)
        return room

    def _run(self, stages: Numbers, forward: NDArray[np.bool_]) -> None:
        """Run the next step of each of ``stages`` in this round."""
        f, b = stages[forward], stages[~forward]
        sent = f[f < len(self._room)]
        self._x[sent, self.forwards[sent] % self._columns] = self.now + self._travel[sent]
        self.forwards[f] += 1
        self._forward_from[f] = self.now + 2
        sent = b[b > 0] - 1
        self._delta[sent, self._backwards[sent + 1] % self._columns] = self.now + self._travel[sent]
        self._backwards[b] += 1
        self._free_from[stages] = self.now + 1

    def state(self) -> Sequence[Numbers]:
        """Return all that the rounds to come depend on, apart from ``stop``. Rounds are relative to the next one."""
        order = (self.forwards[0] + np.arange(self._columns)) % self._columns
        rounds = (self._free_from, self._forward_from, self._x[:, order], self._delta[:, order])
        return [
            self.forwards - self.forwards[0],
            self._backwards - self.forwards[0],
            *(np.maximum(r - self.now, 0) for r in rounds),
        ]


class PeriodicRounds(Generic[T]):
    """Rounds of a timetable. They are computed during the iteration, until the steady state repeats every ``period`` microbatches.

    Iteration yields ``(offset, round)``. The offset must be added to the microbatch numbers of the round. Can be iterated once.

    Args:
        timetable: Timetable that has not run yet.
        period: Microbatches after which the orders repeat: 1, or k if the pipeline drains every k microbatches.
        convert: Conversion of each round. A round of the steady state is converted once.

    Attributes:
        period: Microbatches in one period of the steady state.
        length: Rounds in one period, once they are known.
        period_rounds: Rounds of one period, once they are known.
        repeats: Number of times that they are repeated.
    """

    def __init__(self, timetable: Timetable, period: int, convert: Callable[[Round], T]) -> None:
        self._timetable, self._convert, self.period = timetable, convert, period
        self.period_rounds: list[T] = []
        self.repeats = self.length = 0

    def __iter__(self) -> Iterator[tuple[int, T]]:
        return self.iterate(lambda remaining: remaining)

    def iterate(self, choose_remaining: Callable[[int], int]) -> Iterator[tuple[int, T]]:
        """Iterate, but run fewer periods if ``choose_remaining`` asks for it. This is how a run stops early.

        Args:
            choose_remaining: Called before each repetition with the number of repetitions left. Returns how many of them to run.
        """
        timetable, offset = self._timetable, 0
        for round_ in self.until_steady():
            yield offset, round_
        remaining = max(0, int(timetable.stop - 1 - timetable.forwards[0]) // self.period) if self.period_rounds else 0
        self.repeats = remaining
        timetable.stop -= remaining * self.period
        while remaining and (remaining := choose_remaining(remaining)):
            offset += self.period
            for round_ in self.period_rounds:
                yield offset, round_
            remaining -= 1
        for last in timetable:
            yield offset, self._convert(last)

    def converted(self, convert: Callable[[T], U]) -> PeriodicRounds[U]:
        """Return the same sequence with ``convert`` applied to each round."""
        first = self._convert
        return PeriodicRounds(self._timetable, self.period, lambda round_: convert(first(round_)))

    def until_steady(self) -> Iterator[T]:
        """Yield rounds until the state of the timetable is the same as one period before. Then set ``period_rounds``."""
        timetable = self._timetable
        since, state, rounds = timetable.forwards[0], timetable.state(), list[T]()
        start = timetable.now
        for round_ in timetable:
            rounds.append(self._convert(round_))
            yield rounds[-1]
            if timetable.forwards[0] >= since + self.period:
                before, state = state, timetable.state()
                if timetable.forwards[0] == since + self.period and all(map(np.array_equal, before, state)):
                    self.period_rounds, self.length = rounds, timetable.now - start
                    return
                since, rounds, start = timetable.forwards[0], [], timetable.now


def training_rounds(
    delays: Sequence[int], boundary_delays: Sequence[int], start: int, stop: int, flush_every: int | None = None
) -> PeriodicRounds[list[Step]]:
    """Return the rounds of the timetable that trains microbatches ``start`` … ``stop`` − 1. Arguments are those of Timetable."""
    return PeriodicRounds(Timetable(delays, boundary_delays, start, stop, flush_every), flush_every or 1, Round.steps)


def evaluation_rounds(boundary_delays: Sequence[int], stop: int) -> PeriodicRounds[list[Step]]:
    """Return the rounds of the timetable that evaluates microbatches 0 … ``stop`` − 1."""
    return PeriodicRounds(Timetable(None, boundary_delays, 0, stop), 1, Round.steps)
