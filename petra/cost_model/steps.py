"""The steps of a timetable as arrays, for predictions: those that repeat, or those of a whole run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from petra.plan.timetable import Numbers, PeriodicRounds, Round, Timetable

UNLIMITED = 2**40
"""More microbatches than any timetable runs until it repeats."""


class Steps(NamedTuple):
    """Steps of consecutive rounds, one entry per step. Each stage runs ``microbatches`` forwards and as many backwards.

    If the steps repeat, the next repetition has the same steps ``rounds`` rounds later. The microbatches of a stage's forwards are
    consecutive, and so are those of its backwards.

    Attributes:
        rounds: Number of rounds.
        microbatches: Number of microbatches.
        round, stage, forward, microbatch: Round, stage and microbatch of each step, and whether it is a forward. Sorted by round.
    """

    rounds: int
    microbatches: int
    round: Numbers
    stage: Numbers
    forward: NDArray[np.bool_]
    microbatch: Numbers

    @staticmethod
    def of(rounds: Sequence[Round], start: int, stop: int, microbatches: int) -> Steps:
        """Return the steps of the rounds with the numbers ``start`` … ``stop`` − 1, of which the empty ones are left out."""
        numbers = np.concatenate([np.full(len(r.stages), r.round - start) for r in rounds])
        stages, forward, microbatch = (np.concatenate(parts) for parts in zip(*(r[1:] for r in rounds), strict=True))
        return Steps(stop - start, microbatches, numbers, stages, forward, microbatch)

    def repeated(self, times: int) -> Steps:
        """Return the steps of several repetitions as one."""
        index = np.repeat(np.arange(times), len(self.round))
        return Steps(
            times * self.rounds,
            times * self.microbatches,
            np.tile(self.round, times) + index * self.rounds,
            np.tile(self.stage, times),
            np.tile(self.forward, times),
            np.tile(self.microbatch, times) + index * self.microbatches,
        )


def steady_state(delays: Sequence[int], boundary_delays: Sequence[int], flush_every: int | None = None) -> Steps:
    """Return one repetition of the rounds that repeat. Arguments are those of :class:`petra.plan.timetable.Timetable`."""
    timetable = Timetable(delays, boundary_delays, 0, UNLIMITED, flush_every)
    rounds = PeriodicRounds(timetable, flush_every or 1, lambda round_: round_)
    for _ in rounds.until_steady():
        pass
    return Steps.of(rounds.body, rounds.start_of_body, timetable.now, rounds.period)


def all_steps(delays: Sequence[int], boundary_delays: Sequence[int], microbatches: int, flush_every: int | None = None) -> Steps:
    """Return the steps of a run of ``microbatches`` >= 1 microbatches, from an empty pipeline until it has drained."""
    timetable = Timetable(delays, boundary_delays, 0, microbatches, flush_every)
    return Steps.of(list(timetable), 0, timetable.now, microbatches)
