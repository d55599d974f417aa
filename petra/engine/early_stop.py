"""An early end of a stretch of training: all processes leave it after the same microbatch, soon after one was asked to."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

EVERY = 16
"""Bodies of the timetable from a question to its answer, which has long been there by then."""
AHEAD = 2
"""Bodies that are still done after that: receives of so many messages may have been posted."""


class EarlyEnd:
    """Says how much of a timetable is left; for :meth:`petra.plan.rounds.PeriodicRounds.iterate`.

    The question, whether any process has been asked to stop, is a sum that all of them start in the same round. If a process is
    lost, no more are put: that is for the messages between stages to tell, which know the stage and the microbatch.

    Args:
        asked: whether this process has been asked.
        processes: that there are.
        shorten: called with the number of bodies that won't be done.
    """

    def __init__(self, asked: Callable[[], bool], processes: int, shorten: Callable[[int], None]) -> None:
        self._asked, self._processes, self._shorten = asked, processes, shorten
        self._bodies = 0
        self._question: tuple[dist.Work, torch.Tensor] | None = None
        self._lost = False
        self.dropped = 0
        """Bodies that aren't done."""

    def __call__(self, left: int) -> int:
        if self.dropped or self._lost:
            return left
        wanted = self._asked() if self._processes == 1 else self._bodies % EVERY == 0 and self._together()
        self._bodies += 1
        if wanted and left > AHEAD:
            self.dropped = left - AHEAD
            self._shorten(self.dropped)
            return AHEAD
        return left

    def finish(self) -> None:
        """Waits for a question whose answer nobody needs any more."""
        self._answer()

    def _together(self) -> bool:
        """The answer to the question before, and a new question if it was no."""
        if self._answer() or self._lost:
            return not self._lost
        asked = torch.tensor(int(self._asked()))
        try:
            work = dist.all_reduce(asked, async_op=True)
        except RuntimeError:
            self._lost = True
            return False
        assert work is not None, "only a process outside the group gets no handle"
        self._question = work, asked
        return False

    def _answer(self) -> bool:
        if self._question is None:
            return False
        (work, asked), self._question = self._question, None
        try:
            work.wait()
        except RuntimeError:
            self._lost = True
            return False
        return bool(asked)
