"""The static schedule of a pipeline: the order of forwards and backwards of every stage, and the timetable that executes it.

Example: four stages with d = 2 (PETRA). Each column is one tick; within a tick F comes before B. Stage j starts with
τ_j = 2(4 − j) forwards::

    stage 1   F0  F1  F2  F3  F4  F5  F6 B0  F7 B1
    stage 2       F0  F1  F2  F3  F4 B0  F5 B1  F6 B2
    stage 3           F0  F1  F2 B0  F3 B1  F4 B2  F5 B3
    stage 4               F0 B0  F1 B1  F2 B2  F3 B3  F4 B4
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from enum import StrEnum
from heapq import heappop, heappush
from itertools import pairwise
from typing import NamedTuple

from petra.errors import ScheduleError, invalid


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


def training_orders(delays: Sequence[int], start: int, stop: int, flush_every: int | None = None) -> list[Iterator[tuple[Op, int]]]:
    """Return :func:`training_order` of every stage, given the delay τ of each."""
    return [training_order(delay, start, stop, flush_every) for delay in delays]


def evaluation_order(start: int, stop: int) -> Iterator[tuple[Op, int]]:
    """Yield the steps of one stage in evaluation: forwards only."""
    return ((Op.FORWARD, m) for m in range(start, stop))


def in_flight(delay: int, k: int, flush: bool) -> int:
    """Return the largest number of microbatches between forward and backward at a stage, including the one it works on.

    Args:
        delay: Delay τ of the stage.
        k: Microbatches per update.
        flush: Whether the pipeline drains before each update.
    """
    return min(delay + 1, k) if flush else delay + 1


def timetable(orders: Sequence[Iterable[tuple[Op, int]]], boundary_delays: Sequence[int]) -> Iterator[Step]:
    """Merge the orders of all stages into one global order that respects every dependency.

    Rules:

    - A stage runs at most one step per round, and at most one forward in two rounds (a tick).
    - The receiver uses a message at the earliest max(1, d) rounds after the step that sent it. At d = 2, all stages therefore run
      their forwards in the same rounds, and a message has the other half of the tick to travel.
    - At most d + 1 messages wait at a boundary in each direction. Every transport provides room for that many.

    If each process runs the steps of its stages in this order, the processes can't deadlock: the first step that has not run yet
    never waits for a later one.

    Args:
        orders: Steps of each stage, in order.
        boundary_delays: Delay d of each boundary; ``len(orders) - 1`` numbers.

    Yields:
        Steps sorted by round, then by stage.

    Raises:
        ScheduleError: If the orders deadlock, or if a backward comes before its forward. The message lists what each blocked
            stage waits for.
    """
    return _Timetable(orders, boundary_delays).steps()


def check_training(delays: Sequence[int], boundary_delays: Sequence[int]) -> None:
    """Check that the orders of :func:`training_orders` can be executed, for any number of microbatches and any flush.

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


class _StageState:
    """Progress of one stage in the timetable.

    Attributes:
        next_step: The step to run next; None after the last one.
        free_from: First round in which the stage is idle.
        forward_from: First round in which the stage may run another forward.
        in_flight: Microbatches between forward and backward.
        inbox: For each operation, messages sent to the stage and not used yet: (microbatch, first round in which it can be used).
        queued: Whether the next step is in the queue of the timetable.
    """

    __slots__ = ("_order", "forward_from", "free_from", "in_flight", "inbox", "next_step", "queued")

    def __init__(self, order: Iterable[tuple[Op, int]]) -> None:
        self._order = iter(order)
        self.next_step = next(self._order, None)
        self.free_from = self.forward_from = 0
        self.in_flight: set[int] = set()
        self.inbox: dict[Op, deque[tuple[int, int]]] = {op: deque() for op in Op}
        self.queued = False

    def run(self, op: Op, m: int, now: int) -> None:
        """Record that the next step, ``op`` of microbatch ``m``, runs in round ``now``."""
        if self.inbox[op]:
            self.inbox[op].popleft()
        if op is Op.FORWARD:
            self.in_flight.add(m)
            self.forward_from = now + 2
        else:
            self.in_flight.remove(m)
        self.free_from = now + 1
        self.next_step = next(self._order, None)
        self.queued = False


class _Timetable:
    """Assigns steps to rounds by the rules of :func:`timetable`. A step is queued once its message and its receiver are ready."""

    def __init__(self, orders: Sequence[Iterable[tuple[Op, int]]], boundary_delays: Sequence[int]) -> None:
        self._stages = [_StageState(order) for order in orders]
        self._boundary_delays = boundary_delays
        self._queue: list[tuple[int, int]] = []  # (earliest round, stage)

    def steps(self) -> Iterator[Step]:
        stages = self._stages
        for j in range(len(stages)):
            self._enqueue(j)
        now = 0
        while self._queue:
            earliest, j = heappop(self._queue)
            now = max(now, earliest)
            op, m = stages[j].next_step  # type: ignore[misc]
            yield Step(now, j, op, m)
            stages[j].run(op, m, now)
            receiver = j + 1 if op is Op.FORWARD else j - 1
            if 0 <= receiver < len(stages):
                stages[receiver].inbox[op].append((m, now + max(1, self._boundary_delays[min(j, receiver)])))
            for neighbour in (j, j - 1, j + 1):
                if 0 <= neighbour < len(stages):
                    self._enqueue(neighbour)
        waiting = ((j, stage.next_step) for j, stage in enumerate(stages) if stage.next_step is not None)
        blocked = [f"stage {j + 1} waits to run {op}{m}" for j, (op, m) in waiting]
        if blocked:
            raise ScheduleError("the schedule deadlocks: " + ", ".join(blocked))

    def _enqueue(self, j: int) -> None:
        """Queue the next step of stage ``j`` unless it has to wait for a message or for room at the receiver."""
        stage = self._stages[j]
        if stage.next_step is None or stage.queued:
            return
        op, m = stage.next_step
        earliest = stage.free_from
        if op is Op.FORWARD:
            sender, receiver = j - 1, j + 1
            earliest = max(earliest, stage.forward_from)
        else:
            sender, receiver = j + 1, j - 1
            if m not in stage.in_flight:
                raise ScheduleError(f"stage {j + 1}: backward of microbatch {m} comes before its forward")
        if 0 <= sender < len(self._stages):
            messages = stage.inbox[op]
            if not messages or messages[0][0] != m:
                return
            earliest = max(earliest, messages[0][1])
        if 0 <= receiver < len(self._stages):
            waiting = len(self._stages[receiver].inbox[op])
            if waiting > self._boundary_delays[min(j, receiver)]:
                return
        heappush(self._queue, (earliest, j))
        stage.queued = True
