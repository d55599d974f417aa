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
from petra.torch_private import has_hooks
from petra.transport import Transfer, Transport

if TYPE_CHECKING:
    from petra.engine.options.early_stop import EarlyStop


class BoundStep(NamedTuple):
    """A step on a stage of this process.

    Attributes:
        worker: Worker of the stage.
        method: Name of its method that runs the step, given the microbatch.
        microbatch: Number of the microbatch.
    """

    worker: Worker
    method: str
    microbatch: int

    def locate(self, error: Exception) -> None:
        """Add a note that names stage, microbatch and pass to an exception."""
        operation = "evaluation" if self.method == "evaluate" else self.method
        error.add_note(f"in stage {self.worker.index + 1}, microbatch {self.microbatch}, {operation}")


class ProcessRound(NamedTuple):
    """One process's part of a round.

    Attributes:
        steps: Its steps, which do not depend on each other.
        transfers: Its transfers, which follow the steps.
        completed: The microbatch whose backward ends at the first stage in this round, if any. No message of it is in flight after
            the transfers.
    """

    steps: list[BoundStep]
    transfers: Sequence[Transfer]
    completed: int | None

    def shifted(self, shift: int) -> ProcessRound:
        """Return the same round for microbatches whose numbers are larger by ``shift``."""
        if not shift:
            return self
        steps = [step._replace(microbatch=step.microbatch + shift) for step in self.steps]
        return ProcessRound(steps, self.transfers, None if self.completed is None else self.completed + shift)


Strategy = Callable[[Iterable[ProcessRound]], Iterator[ProcessRound]]
"""Runs the steps of rounds, and yields each round after its steps. The executor then makes the round's transfers."""


def in_turn(rounds: Iterable[ProcessRound]) -> Iterator[ProcessRound]:
    """Strategy that runs steps one after another."""
    for round_ in rounds:
        for step in round_.steps:
            try:
                getattr(step.worker, step.method)(step.microbatch)
            except Exception as error:
                step.locate(error)
                raise
        yield round_


class Executor:
    """Runs the stages of one process, round by round, by the same timetable as all other processes.

    Args:
        plan: Plan of the run.
        workers: Workers of this process, by stage.
        transport: Transport to the other processes of this replica.
        hooks: Hooks that observe training.
        strategy: Runs the steps of each round.
    """

    def __init__(
        self, plan: Plan, workers: Mapping[int, Worker], transport: Transport, hooks: Hooks, strategy: Strategy = in_turn
    ) -> None:
        self._plan, self._workers, self._transport, self._hooks = plan, workers, transport, hooks
        self._strategy, self._drained = strategy, True

    def train(self, start: int, end: int, stop: Callable[[], bool] | None = None) -> int:
        """Run forwards, backwards and updates of microbatches ``start`` ... ``end`` - 1, then drain the pipeline.

        Returns:
            The number of microbatches done: fewer than ``end - start`` if ``stop`` returned True.

        Raises:
            ModelError: If a parameter was frozen or unfrozen since the pipeline was built.
        """
        for j, worker in self._workers.items():
            worker.stage.begin_run(j + 1)
            if any(map(has_hooks, worker.stage.gradients.parameters)):
                from petra.engine.options.parameter_hooks import call_hooks_of

                call_hooks_of(worker)
        plan, layout = self._plan, self._plan.layout
        rounds = training_rounds(plan.delays, plan.boundary_delays, start, end, plan.flush_every)
        # A rank without a stage would wait in the last collective for the whole run, and time out. Polls for an early stop, which
        # are collectives too, keep such ranks in step with the others.
        early = None
        if stop is not None or not all(layout.processes):
            from petra.engine.options.early_stop import EarlyStop

            early = EarlyStop(stop or (lambda: False), layout.dp * len(layout.processes), rounds.period, self._transport)
        with self._observing(), torch.no_grad():  # blocks record the graphs that they need
            for round_ in self._begin(rounds, end - start, training=True, early=early):
                self._exchange(round_)
            self._finish()
        return end - start - (0 if early is None else early.finish())

    def evaluate(self, microbatches: int) -> None:
        """Run forwards of microbatches 0 ... ``microbatches`` - 1."""
        rounds = evaluation_rounds(self._plan.boundary_delays, microbatches)
        with torch.no_grad():
            for round_ in self._begin(rounds, microbatches, training=False):
                self._exchange(round_)
            self._finish()

    def _observing(self) -> AbstractContextManager[None]:
        """Return a context in which the attached hooks observe the workers."""
        if not self._hooks.attached_hooks:
            return NOTHING
        from petra.engine.options.observed import observing

        return observing(self._workers, self._plan.layout.stages, self._hooks, self._transport)

    def _begin(
        self, rounds: PeriodicRounds[list[Step]], microbatches: int, *, training: bool, early: EarlyStop | None = None
    ) -> Iterator[ProcessRound]:
        """Begin a run, and return this process's part of its rounds, each after its steps."""
        if not self._drained:
            expected, got = "a new one", "one whose last run ended in an error, with messages still in flight"
            raise invalid("pipeline", expected, got, PetraError)
        self._drained = False
        self._transport.begin(microbatches, training)
        mine = rounds.map(lambda steps: self._select(steps, training))
        return self._strategy(part.shifted(shift) for shift, part in (mine if early is None else mine.iterate(early)))

    def _exchange(self, round_: ProcessRound) -> None:
        if round_.transfers:
            self._transport.exchange(round_.transfers)

    def _finish(self) -> None:
        self._transport.finish()
        self._drained = True

    def _select(self, steps: Sequence[Step], training: bool) -> ProcessRound:
        """Return this process's part of a round."""
        methods = {Op.FORWARD: "forward" if training else "evaluate", Op.BACKWARD: "backward"}
        mine = [
            BoundStep(self._workers[step.stage], methods[step.op], step.microbatch) for step in steps if step.stage in self._workers
        ]
        completed = next((step.microbatch for step in steps if step.stage == 0 and step.op is Op.BACKWARD), None)
        return ProcessRound(mine, self._transport.transfers(steps), completed)
