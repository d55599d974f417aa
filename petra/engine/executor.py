"""Runs the stages of one process round by round, in the order of the schedule, and exchanges messages between rounds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, NamedTuple

import torch

from petra.engine.worker import Worker
from petra.errors import PetraError, invalid
from petra.hooks import Hooks
from petra.plan import Plan
from petra.plan.timetable import Op, PeriodicRounds, Step, evaluation_rounds, training_rounds
from petra.reversible.replay import NOTHING
from petra.transport import Transfer, Transport

if TYPE_CHECKING:
    from petra.engine.options.early_stop import EarlyStop


class BoundStep(NamedTuple):
    """A forward or backward of one microbatch, or a forward in evaluation, on a stage of this process.

    In a ``with`` block, exceptions get a note that names stage, microbatch and pass.

    Attributes:
        op: Kind of the step.
        worker: Worker of the stage.
        call: The worker's method that runs the step, given the microbatch.
        microbatch: Number of the microbatch.
    """

    op: Op
    worker: Worker
    call: Callable[[int], None]
    microbatch: int

    def run(self, call: Callable[[int], None] | None = None) -> None:
        """Run the step, or ``call`` as a part of it."""
        with self:
            (call or self.call)(self.microbatch)

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, *_: object) -> None:
        """Add a note that names stage, microbatch and pass to an exception."""
        if isinstance(error, Exception):
            operation = "evaluation" if self.call.__name__ == "evaluate" else self.call.__name__
            error.add_note(f"in stage {self.worker.index + 1}, microbatch {self.microbatch}, {operation}")


class ProcessRound(NamedTuple):
    """One process's part of a round.

    Attributes:
        number: Number of the round.
        steps: Its steps, which do not depend on each other.
        transfers: Its transfers, which follow the steps.
        completed: The microbatch whose backward ends at the first stage in this round, if any. No message of it is in flight after
            the transfers.
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


Strategy = Callable[[Iterable[ProcessRound]], Iterator[ProcessRound]]
"""Runs the steps of rounds, and yields each round after its steps. The executor then makes the round's transfers."""


def in_turn(rounds: Iterable[ProcessRound]) -> Iterator[ProcessRound]:
    """Strategy that runs steps one after another."""
    for round_ in rounds:
        for step in round_.steps:
            with step:
                step.call(step.microbatch)
        yield round_


class Executor:
    """Runs the stages of one process, round by round, by the same timetable as all other processes.

    Args:
        plan: Plan of the run.
        workers: Workers of this process, by stage.
        transport: Transport to the other processes of this replica; None if there are none.
        hooks: Hooks that observe training.
        strategy: Runs the steps of each round.
    """

    def __init__(
        self,
        plan: Plan,
        workers: Mapping[int, Worker],
        transport: Transport | None,
        hooks: Hooks,
        strategy: Strategy = in_turn,
    ) -> None:
        self._plan, self._workers, self._transport, self._hooks = plan, workers, transport, hooks
        self._strategy = strategy
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
        for j, worker in self._workers.items():
            worker.stage.begin_run(j + 1)
        plan = self._plan
        rounds = training_rounds(plan.delays, plan.boundary_delays, start, end, plan.flush_every)
        early = None
        if stop is not None or self._has_idle_ranks:
            from petra.engine.options.early_stop import EarlyStop

            shorten = self._transport.shorten if self._transport is not None else lambda messages: None
            early = EarlyStop(stop or (lambda: False), self._processes, lambda periods: shorten(periods * rounds.period))
        observation: AbstractContextManager[None] = NOTHING
        if self._hooks.attached_hooks:
            from petra.engine.options.observed import observing

            observation = observing(self._workers, plan.layout.stages, self._hooks)
        with observation, torch.no_grad():  # blocks record the graphs that they need
            for round_ in self._begin(rounds, end - start, training=True, early=early):
                self._exchange(round_, training=True)
            self._finish()
        if early is None:
            return end - start
        early.finish()
        return end - start - early.dropped * rounds.period

    def evaluate(self, microbatches: int) -> None:
        """Run forwards of microbatches 0 ... ``microbatches`` - 1."""
        rounds = evaluation_rounds(self._plan.boundary_delays, microbatches)
        with torch.no_grad():
            for round_ in self._begin(rounds, microbatches, training=False):
                self._exchange(round_, training=False)
            self._finish()

    def _begin(
        self, rounds: PeriodicRounds[list[Step]], microbatches: int, *, training: bool, early: EarlyStop | None = None
    ) -> Iterator[ProcessRound]:
        """Begin a run, and return its rounds, each after its steps."""
        if not self._drained:
            raise invalid(
                "pipeline", "a new one", "one whose last run ended in an error, with messages still in flight", PetraError
            )
        self._drained = False
        if self._transport is not None:
            self._transport.begin(microbatches, training)
        mine = rounds.map(lambda round_: self._select(round_, training))
        shifted = (
            part.shifted(shift, shift // mine.period * mine.length)
            for shift, part in (mine if early is None else mine.iterate(early))
        )
        return self._strategy(shifted)

    def _finish(self) -> None:
        if self._transport is not None:
            self._transport.finish()
        self._drained = True

    def _exchange(self, round_: ProcessRound, *, training: bool) -> None:
        """Make the transfers of a round."""
        if self._transport is None or not round_.transfers:
            return
        for call in self._hooks.exchange_begin if training else ():
            call(self._last_stage)
        self._transport.exchange(round_.transfers)
        for call in self._hooks.exchange_end if training else ():
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
