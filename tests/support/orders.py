"""Orders of steps, and a checker that runs them without a clock."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence

from petra import ScheduleError
from petra.plan.timetable import Op


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


def check_orders(orders: Sequence[Iterable[tuple[Op, int]]], boundary_delays: Sequence[int]) -> None:
    """Check that stages that run these orders never deadlock, whatever the timing.

    Each stage runs its next step as soon as the message for it has arrived and the receiver of its own message has room. No step
    takes a message or room from another stage, so if one sequence of steps reaches the end, all do.

    Args:
        orders: Steps of each stage, in order.
        boundary_delays: Delay d of each boundary, which has room for d + 1 messages in each direction.

    Raises:
        ScheduleError: If they deadlock, or if a backward comes before its forward. The message lists what each blocked stage waits
            for.
    """
    left, last = [deque(order) for order in orders], len(orders) - 1
    sent: dict[tuple[Op, int], deque[int]] = {(op, j): deque() for op in Op for j in range(-1, last + 2)}  # by receiver
    stored: list[set[int]] = [set() for _ in orders]
    ready = list(range(last + 1))
    while ready:
        j = ready.pop()
        if not left[j]:
            continue
        op, m = left[j][0]
        before, after = (j - 1, j + 1) if op is Op.FORWARD else (j + 1, j - 1)
        if op is Op.BACKWARD and m not in stored[j]:
            raise ScheduleError(f"stage {j + 1}: backward of microbatch {m} comes before its forward")
        arrived = not 0 <= before <= last or (sent[op, j] and sent[op, j][0] == m)
        if not arrived or (0 <= after <= last and len(sent[op, after]) > boundary_delays[min(j, after)]):
            continue
        left[j].popleft()
        (stored[j].add if op is Op.FORWARD else stored[j].remove)(m)
        if 0 <= before <= last:
            sent[op, j].popleft()
        sent[op, after].append(m)
        ready += [i for i in (j - 1, j + 1, j) if 0 <= i <= last]
    if blocked := [f"stage {j + 1} waits to run {order[0][0]}{order[0][1]}" for j, order in enumerate(left) if order]:
        raise ScheduleError("the schedule deadlocks: " + ", ".join(blocked))
