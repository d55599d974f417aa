"""The steady state of a timetable: the rounds that repeat, written down directly for the usual delays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from petra.plan.rounds import Numbers, PeriodicRounds, Timetable


class SteadyState(NamedTuple):
    """Steps of one repetition, as arrays with one entry per step. The next repetition has the same steps ``rounds`` rounds later.

    Each stage runs ``microbatches`` forwards and as many backwards, of consecutive microbatches. The numbers of the microbatches
    may be negative.

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

    def repeated(self, times: int) -> SteadyState:
        """Return the steps of several repetitions as one."""
        index = np.repeat(np.arange(times), len(self.round))
        return SteadyState(
            times * self.rounds,
            times * self.microbatches,
            np.tile(self.round, times) + index * self.rounds,
            np.tile(self.stage, times),
            np.tile(self.forward, times),
            np.tile(self.microbatch, times) + index * self.microbatches,
        )


def steady_state(delays: Sequence[int], boundary_delays: Sequence[int], flush_every: int | None = None) -> SteadyState:
    """Return the steady state of the timetable. Arguments are those of :class:`petra.plan.rounds.Timetable`.

    If no boundary has d = 0 or all have, or if every stage forwards all microbatches of an update before its first backward, the
    rounds follow from a formula. Otherwise they are taken from a timetable that runs until it repeats.
    """
    if flush_every is not None and min(delays) >= flush_every - 1:
        return _filled(boundary_delays, flush_every)
    if min(boundary_delays, default=1) >= 1:
        return _interleaved(np.array(delays), flush_every)
    if max(boundary_delays) == 0:
        return _sequential(len(delays))
    return run_until_steady(delays, boundary_delays, flush_every)


def _steps(rounds: int, microbatches: int, forward: Numbers, backward: Numbers) -> SteadyState:
    """Return the steps whose rounds are given as arrays of shape (stages, microbatches), shifted into one repetition."""
    round_ = np.stack([forward, backward])
    shift = round_ // rounds
    backwards, stage, microbatch = (index.ravel() for index in np.indices(round_.shape))
    round_, shift = (round_ - shift * rounds).ravel(), shift.ravel()
    order = np.lexsort((stage, round_))
    forwards, microbatch = backwards == 0, microbatch - shift * microbatches
    return SteadyState(rounds, microbatches, round_[order], stage[order], forwards[order], microbatch[order])


def _interleaved(delays: Numbers, flush_every: int | None) -> SteadyState:
    """d >= 1: F of microbatch m in round 2m + τ_1 − τ_j, and B in round 2m + τ_1 + τ_j + 1.

    F and B of a stage are in rounds of different parity, and each message is used d rounds after it was sent.
    """
    count = flush_every or 1
    m, first = np.arange(count), delays[0]
    forward, backward = (2 * m + (first + shift)[:, None] for shift in (-delays, delays + 1))
    return _steps(2 if flush_every is None else 2 * (count + int(first)), count, forward, backward)


def _filled(boundary_delays: Sequence[int], count: int) -> SteadyState:
    """All forwards, one in two rounds, then all backwards, one in each round. Messages take max(1, d) rounds."""
    travel = np.concatenate([[0], np.cumsum(np.maximum(1, np.array(boundary_delays, dtype=np.int64)))])[:, None]
    last = 2 * (count - 1) + 2 * travel[-1] + 1
    m = np.arange(count)
    return _steps(int(last[0]) + count, count, 2 * m + travel, last + m - travel)


def _sequential(stages: int) -> SteadyState:
    """d = 0: one microbatch after the other."""
    j = np.arange(stages)[:, None]
    return _steps(2 * stages, 1, j, 2 * stages - 1 - j)


def run_until_steady(delays: Sequence[int], boundary_delays: Sequence[int], flush_every: int | None = None) -> SteadyState:
    """Return the steady state of the timetable, for any delays, by running it until it repeats."""
    timetable = Timetable(delays, boundary_delays, 0, 2**40, flush_every)
    rounds = PeriodicRounds(timetable, flush_every or 1, lambda round_: round_)
    for _ in rounds.until_steady():
        pass
    numbers = np.concatenate([np.full(len(r.stages), r.round) for r in rounds.body])
    stages, microbatches = (np.concatenate(parts) for parts in zip(*((r.stages, r.microbatches) for r in rounds.body), strict=True))
    forward = np.concatenate([r.forward for r in rounds.body])
    start = rounds.start_of_body
    return SteadyState(timetable.now - start, rounds.period, numbers - start, stages, forward, microbatches)
