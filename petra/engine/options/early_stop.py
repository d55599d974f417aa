"""Early stop of a run: after one process is asked to stop, all processes stop after the same microbatch."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import torch
import torch.distributed as dist

from petra.transport import Transport

POLL_EVERY = 16
"""Periods of the timetable between two polls. The asynchronous all-reduce of a poll has finished by the next one."""
PERIODS_AFTER_STOP = 2
"""Periods that still run after a stop, because receives for their messages may already be posted."""


class EarlyStop:
    """Decides before each period of a timetable how many periods still run (:meth:`petra.plan.timetable.PeriodicRounds.iterate`).

    A poll is an all-reduce of one number per process: 1 if that process has been asked to stop. All processes start it before the
    same period. If an all-reduce fails, a process is lost and polling ends. The messages between stages then report the error,
    because they name the stage and the microbatch.

    Args:
        stop_requested: Returns whether this process has been asked to stop.
        processes: Number of processes that stop together.
        period: Microbatches in one period.
        transport: Transport that expects messages of all periods.
    """

    def __init__(self, stop_requested: Callable[[], bool], processes: int, period: int, transport: Transport) -> None:
        self._stop_requested, self._processes, self._period, self._transport = stop_requested, processes, period, transport
        self._periods = self._dropped = 0
        self._all_reduce: tuple[dist.Work, torch.Tensor] | None = None
        self._process_lost = False

    def __call__(self, left: int) -> int:
        """Return how many of the ``left`` periods still run."""
        if self._dropped or self._process_lost:
            return left
        due = self._periods % POLL_EVERY == 0
        self._periods += 1
        stop = self._stop_requested() if self._processes == 1 else due and self._poll()
        if stop and left > PERIODS_AFTER_STOP:
            self._dropped = (left - PERIODS_AFTER_STOP) * self._period
            self._transport.shorten(self._dropped)
            return PERIODS_AFTER_STOP
        return left

    def finish(self) -> int:
        """Wait for an all-reduce that is still running; its result is ignored. Return the number of microbatches not done."""
        with suppress(RuntimeError):
            self._wait()
        return self._dropped

    def _poll(self) -> bool:
        """Return the result of the last all-reduce, and start the next one if no process has been asked to stop."""
        requested = torch.tensor(int(self._stop_requested()))
        try:
            if self._wait():
                return True
            work = dist.all_reduce(requested, async_op=True)
        except RuntimeError:
            self._process_lost = True
            return False
        assert work is not None, "only a process outside the group gets no handle"
        self._all_reduce = work, requested
        return False

    def _wait(self) -> bool:
        """Wait for the all-reduce under way, and return whether any process has been asked to stop."""
        if self._all_reduce is None:
            return False
        (work, requested), self._all_reduce = self._all_reduce, None
        work.wait()
        return bool(requested)
