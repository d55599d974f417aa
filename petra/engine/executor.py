"""Runs the stages of one process round by round, in the order of the schedule, and exchanges messages between rounds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from petra.engine.block import Reconstruct
from petra.engine.checks import CheckedFunction, unchecked
from petra.engine.worker import Worker
from petra.errors import PetraError, require
from petra.hooks import Hooks
from petra.plan import Plan
from petra.plan.timetable import Op, PeriodicRounds, Step, training_rounds
from petra.reversible.replay import NOTHING
from petra.torch_private import hooks_of
from petra.transport import Transport

if TYPE_CHECKING:
    from petra.engine.options.early_stop import EarlyStop


class ProcessRound(NamedTuple):
    """One process's part of a round.

    Attributes:
        steps: Method of a worker, microbatch, and names of stage and pass, of each step.
        transfers: Its transfers, which follow the steps.
        completed: The microbatch whose backward ends at the first stage in this round, if any. No message of it is in flight after
            the transfers.
    """

    steps: list[tuple[Callable[[int], None], int, str, str]]
    transfers: Sequence[Any]
    completed: int | None


class Executor:
    """Runs the stages of one process, round by round, by the same timetable as all other processes.

    Args:
        plan: Plan of the run.
        workers: Workers of this process, by stage.
        transport: Transport to the other processes of this replica.
        hooks: Hooks that observe training.
        on_completed: Called with each microbatch in training, once its messages have arrived at all stages; None for nothing.
    """

    def __init__(
        self,
        plan: Plan,
        workers: Mapping[int, Worker],
        transport: Transport,
        hooks: Hooks,
        on_completed: Callable[[int], None] | None = None,
    ) -> None:
        self._plan, self._workers, self._transport, self._hooks = plan, workers, transport, hooks
        self._on_completed, self._drained, self._warned = on_completed, True, set[str]()

    def prepare(
        self, start: int, end: int, stop: Callable[[], bool] | None = None
    ) -> tuple[PeriodicRounds[list[Step]], EarlyStop | None]:
        """Prepare to train on microbatches ``start`` ... ``end`` - 1.

        Returns:
            The rounds of forwards, backwards and updates, the last of which drain the pipeline, and what may end them earlier.

        Raises:
            ModelError: If a parameter was frozen or unfrozen since the pipeline was built.
        """
        for j, worker in self._workers.items():
            worker.stage.begin_run(j + 1)
            for runner in unchecked(worker.stage):
                kind: type[CheckedFunction] = CheckedFunction
                if isinstance(runner, Reconstruct):
                    from petra.engine.options.checked_inverse import CheckedInverse

                    kind = CheckedInverse
                kind(runner, self._plan.numerics.autocast, self._warned)
            if any(any(hooks_of(p)) for p in worker.stage.gradients.parameters):
                from petra.engine.options.parameter_hooks import call_hooks_of

                call_hooks_of(worker)
        plan, layout = self._plan, self._plan.layout
        rounds = training_rounds(plan.delays, plan.boundary_delays, start, end, plan.flush_every)
        # A rank without a stage would wait in the last collective for the whole run, and time out. Polls for an early stop, which
        # are collectives too, keep such ranks in step with the others.
        if stop is None and all(layout.processes):
            return rounds, None
        from petra.engine.options.early_stop import EarlyStop

        count = layout.dp * len(layout.processes) * layout.tp
        return rounds, EarlyStop(stop or (lambda: False), count, rounds.period, self._transport)

    @torch.no_grad()  # blocks record the graphs that they need
    def run(self, rounds: PeriodicRounds[list[Step]], microbatches: int, *, training: bool, early: EarlyStop | None = None) -> None:
        """Run this process's part of rounds over ``microbatches`` until all messages have arrived.

        Args:
            early: What may end a run of training earlier.
        """
        got = "one whose last run ended in an error, with messages still in flight"
        require(self._drained, "pipeline", "a new one", got, PetraError)
        self._drained = False
        self._transport.begin(microbatches, training)
        mine = rounds.converted(lambda steps: self._select(steps, training))
        for shift, (steps, transfers, completed) in mine if early is None else mine.iterate(early):
            for run, m, stage, name in steps:
                try:
                    run(m + shift)
                except Exception as error:
                    error.add_note(f"in {stage}, microbatch {m + shift}, {name}")
                    raise
            if transfers:
                self._transport.exchange(transfers, shift)
            if completed is not None and self._on_completed is not None:
                self._on_completed(completed + shift)
        self._transport.finish()
        self._drained = True

    def observing(self) -> AbstractContextManager[None]:
        """Return a context in which the attached hooks observe the workers."""
        if not self._hooks:
            return NOTHING
        from petra.engine.options.observed import observing

        return observing(self._workers, self._plan.layout.stages, self._hooks, self._transport)

    def _select(self, steps: Sequence[Step], training: bool) -> ProcessRound:
        """Return this process's part of a round."""
        methods = {Op.FORWARD: "forward" if training else "evaluate", Op.BACKWARD: "backward"}
        own = [(step.stage, methods[step.op], step.microbatch) for step in steps if step.stage in self._workers]
        mine = [(getattr(self._workers[j], f), m, f"stage {j + 1}", f if training else "evaluation") for j, f, m in own]
        completed = next((step.microbatch for step in steps if step.stage == 0 and step.op is Op.BACKWARD), None)
        return ProcessRound(mine, self._transport.transfers(steps), completed)
