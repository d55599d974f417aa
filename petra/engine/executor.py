"""Runs the stages of one process round by round, in the order of the schedule, and exchanges messages between rounds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from petra.engine.early_stop import EarlyStop
from petra.engine.options.observed import observing
from petra.engine.steps import BoundStep, StepRunner
from petra.engine.worker import Worker
from petra.errors import PetraError, invalid
from petra.hooks import Hooks
from petra.plan import Plan
from petra.plan.timetable import Op, PeriodicRounds, Step, evaluation_rounds, training_rounds
from petra.transport import Transfer, Transport


class ProcessRound(NamedTuple):
    """One process's part of a round.

    Attributes:
        number: Number of the round.
        steps: Its steps.
        transfers: Its transfers.
        completed: The microbatch whose backward ends at the first stage in this round, if any.
    """

    number: int
    steps: list[BoundStep]
    transfers: Sequence[Transfer]
    completed: int | None

    def shifted(self, shift: int, rounds: int) -> ProcessRound:
        """Return the round that is ``rounds`` later, for microbatches whose numbers are larger by ``shift``."""
        if not shift:
            return self
        steps = [step._replace(microbatch=step.microbatch + shift) for step in self.steps]
        completed = None if self.completed is None else self.completed + shift
        return ProcessRound(self.number + rounds, steps, self.transfers, completed)


class Executor:
    """Runs the stages of one process, round by round, by the same timetable as all other processes.

    Args:
        plan: Plan of the run.
        workers: Workers of this process, by stage.
        transport: Transport to the other processes of this replica; None if there are none.
        hooks: Hooks that observe training.
        runner: Runs the steps of a round; None runs them in turn.
        on_completed: Called with each microbatch after the round in which its last backward, that of the first stage, has run. No
            message of the microbatch is in flight then.
    """

    def __init__(
        self,
        plan: Plan,
        workers: Mapping[int, Worker],
        transport: Transport | None,
        hooks: Hooks,
        *,
        runner: StepRunner | None,
        on_completed: Callable[[int], None] | None,
    ) -> None:
        self._plan, self._workers, self._transport, self._hooks = plan, workers, transport, hooks
        self._runner, self._on_completed = runner, on_completed
        self._processes = plan.layout.dp * len(plan.layout.processes)
        # A rank without a stage would wait in the last collective for the whole run, and time out. Polls for an early stop, which
        # are collectives too, keep such ranks in step with the others.
        self._has_idle_ranks = not all(plan.layout.processes)
        self._last_stage = max(workers, default=-1)
        self._drained = True

    def train(self, start: int, end: int, stop: Callable[[], bool] | None = None) -> int:
        """Run forwards, backwards and updates of microbatches ``start`` ... ``end`` - 1, then drain the pipeline.

        Returns:
            The number of microbatches done: fewer than ``end - start`` if ``stop`` returned True.

        Raises:
            ModelError: If a parameter was frozen or unfrozen since the pipeline was built.
        """
        for worker in self._workers.values():
            worker.stage.begin_run()
            for runner in worker.stage.runners:
                runner.prepare_training()
        plan = self._plan
        rounds = training_rounds(plan.delays, plan.boundary_delays, start, end, plan.flush_every)
        with observing(self._workers, self._hooks):
            return self._run(rounds, end - start, training=True, stop=stop)

    def evaluate(self, microbatches: int) -> None:
        """Run forwards of microbatches 0 ... ``microbatches`` - 1."""
        self._run(evaluation_rounds(self._plan.boundary_delays, microbatches), microbatches, training=False)

    def _run(
        self,
        rounds: PeriodicRounds[list[Step]],
        microbatches: int,
        *,
        training: bool,
        stop: Callable[[], bool] | None = None,
    ) -> int:
        if not self._drained:
            raise invalid(
                "pipeline", "a new one", "one whose last run ended in an error, with messages still in flight", PetraError
            )
        self._drained = False
        transport = self._transport
        if transport is not None:
            transport.begin(microbatches, training)
        early = None
        if stop is None and self._has_idle_ranks:
            stop = _never
        if stop is not None:
            shorten = transport.shorten if transport is not None else lambda messages: None
            early = EarlyStop(stop, self._processes, lambda bodies: shorten(bodies * rounds.period))
        mine = rounds.map(lambda round_: self._select(round_, training))
        looks_ahead = self._runner is not None and self._runner.looks_ahead
        mine_shifted = (
            part.shifted(shift, shift // mine.period * mine.length)
            for shift, part in (mine if early is None else mine.iterate(early))
        )
        with torch.no_grad():  # blocks record the graphs that they need
            for round_, following in _with_next(mine_shifted) if looks_ahead else _alone(mine_shifted):
                if self._runner is not None:
                    self._runner.run(round_.steps, following)
                else:  # few calls lie between train() and a block
                    for step in round_.steps:
                        try:
                            step.call(step.microbatch)
                        except Exception as error:
                            step.locate(error)
                            raise
                if transport is not None and round_.transfers:
                    self._exchange(transport, round_.transfers, training)
                if self._on_completed is not None and round_.completed is not None:
                    self._on_completed(round_.completed)
        if transport is not None:
            transport.finish()
        self._drained = True
        if early is None:
            return microbatches
        early.finish()
        return microbatches - early.dropped * rounds.period

    def _exchange(self, transport: Transport, transfers: Sequence[Transfer], training: bool) -> None:
        if not training:
            transport.exchange(transfers)
            return
        for call in self._hooks.exchange_begin:
            call(self._last_stage)
        transport.exchange(transfers)
        for call in self._hooks.exchange_end:
            call(self._last_stage)

    def _select(self, round_: Sequence[Step], training: bool) -> ProcessRound:
        """Return this process's part of a round."""
        mine = [step for step in round_ if step.stage in self._workers]
        steps = []
        for _, stage, op, m in mine:
            worker = self._workers[stage]
            call = worker.backward if op is Op.BACKWARD else worker.forward if training else worker.evaluate
            steps.append(BoundStep(op, worker, call, m))
        completed = next((step.microbatch for step in round_ if step.stage == 0 and step.op is Op.BACKWARD), None)
        transfers = self._transport.transfers(round_) if self._transport is not None else ()
        return ProcessRound(round_[0].round, steps, transfers, completed)


def _alone(rounds: Iterator[ProcessRound]) -> Iterator[tuple[ProcessRound, Sequence[BoundStep]]]:
    return ((round_, ()) for round_ in rounds)


def _with_next(rounds: Iterator[ProcessRound]) -> Iterator[tuple[ProcessRound, Sequence[BoundStep]]]:
    """Yield each round with the steps of the next one. Empty rounds are left out of ``rounds``, and have no steps."""
    current = next(rounds, None)
    while current is not None:
        following = next(rounds, None)
        yield current, following.steps if following is not None and following.number == current.number + 1 else ()
        current = following


def _never() -> bool:
    return False
