"""A checker of deadlocks that runs orders of steps without a clock."""

from collections import deque
from collections.abc import Sequence

from petra import ScheduleError
from petra.plan.timetable import Op


def check_orders(orders: Sequence[Sequence[tuple[int, Op, int]]], boundary_delays: Sequence[int]) -> None:
    """Check that processes that run these orders never deadlock, whatever the timing.

    A process receives what a step needs, runs it, and sends the result. It waits to receive until the message is there, and to send
    until the receiver has room. No process takes a message or room from another one, so if one sequence of steps reaches the end,
    all do.

    Args:
        orders: Steps of each process, in order: stage, operation and microbatch.
        boundary_delays: Delay d of each boundary, which has room for d + 1 messages in each direction between processes.

    Raises:
        ScheduleError: If they deadlock, or if a backward comes before its forward. The message lists what each blocked stage waits
            for.
    """
    owner = {stage: process for process, order in enumerate(orders) for stage, _, _ in order}
    programs: list[deque[tuple[bool, Op, int, int]]] = [deque() for _ in orders]  # whether it sends, operation, sender, microbatch
    for process, order in enumerate(orders):
        for i, (stage, op, m) in enumerate(order):
            if op is Op.BACKWARD and (stage, Op.FORWARD, m) not in order[:i]:
                raise ScheduleError(f"stage {stage + 1}: backward of microbatch {m} comes before its forward")
            for sender in (stage - 1, stage) if op is Op.FORWARD else (stage + 1, stage):
                receiver = sender + (1 if op is Op.FORWARD else -1)
                if owner.get(sender, process) != owner.get(receiver, process):
                    programs[process].append((sender == stage, op, sender, m))
    messages = dict[tuple[Op, int], deque[int]]()
    progress = True
    while progress:
        progress = False
        for program in programs:
            while program:
                sends, op, sender, m = program[0]
                waiting = messages.setdefault((op, sender), deque())
                room = boundary_delays[sender if op is Op.FORWARD else sender - 1] + 1
                if len(waiting) >= room if sends else not waiting or waiting[0] != m:
                    break
                if sends:
                    waiting.append(m)
                else:
                    waiting.popleft()
                program.popleft()
                progress = True
    if any(programs):
        heads = [program[0] for program in programs if program]
        stages = [sender if sends else sender + (1 if op is Op.FORWARD else -1) for sends, op, sender, _ in heads]
        blocked = [f"stage {stage + 1} waits to run {op}{m}" for stage, (_, op, _, m) in zip(stages, heads, strict=True)]
        raise ScheduleError("the schedule deadlocks: " + ", ".join(blocked))
