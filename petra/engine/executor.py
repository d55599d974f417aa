"""Runs the stages of one process round by round, in the order of the schedule, and exchanges messages between rounds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from petra.engine.early_stop import EarlyStop
from petra.engine.worker import Worker
from petra.errors import PetraError, invalid, require
from petra.hooks import Hooks
from petra.plan import Plan
from petra.plan.rounds import PeriodicRounds, evaluation_rounds, training_rounds
from petra.plan.schedule import Op, Step
from petra.transport import Transfer, Transport

TRAINING = {Op.FORWARD: Worker.forward, Op.BACKWARD: Worker.backward}
EVALUATION = {Op.FORWARD: Worker.evaluate}
Call = Callable[[Worker, int], None]
Steps = list[tuple[Call, Worker, int]]
ProcessRound = tuple[Steps, Sequence[Transfer], Steps, int | None]
"""One process's part of a round: its steps; its transfers; the second parts of split backward passes, while which the messages
travel; and the microbatch whose backward ends at the first stage, if any."""


class Executor:
    """Runs the stages of one process, round by round, by the same timetable as all other processes.

    Args:
        plan: Plan of the run.
        workers: Workers of this process, by stage.
        transport: Transport to the other processes of this replica; None if there are none.
        hooks: Hooks that observe training.
        threads: Threads that run the stages of a round at the same time; None runs them one after another.
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
        threads: ThreadPoolExecutor | None,
        on_completed: Callable[[int], None] | None,
    ) -> None:
        self._plan, self._workers, self._transport, self._hooks = plan, workers, transport, hooks
        self._threads, self._on_completed = threads, on_completed
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
            worker.begin_run()
        plan = self._plan
        rounds = training_rounds(plan.delays, plan.boundary_delays, start, end, plan.flush_every)
        return self._run(rounds, end - start, TRAINING, stop)

    def evaluate(self, microbatches: int) -> None:
        """Run forwards of microbatches 0 ... ``microbatches`` - 1."""
        self._run(evaluation_rounds(self._plan.boundary_delays, microbatches), microbatches, EVALUATION)

    def _run(
        self,
        rounds: PeriodicRounds[list[Step]],
        microbatches: int,
        calls: Mapping[Op, Call],
        stop: Callable[[], bool] | None = None,
    ) -> int:
        if not self._drained:
            raise invalid(
                "pipeline", "a new one", "one whose last run ended in an error, with messages still in flight", PetraError
            )
        self._drained = False
        training = calls is TRAINING
        transport = self._transport
        if transport is not None:
            transport.begin(microbatches, training)
        early = None
        if stop is None and self._has_idle_ranks:
            stop = _never
        if stop is not None:
            shorten = transport.shorten if transport is not None else lambda messages: None
            early = EarlyStop(stop, self._processes, lambda bodies: shorten(bodies * rounds.period))
        mine = rounds.map(lambda round_: self._select(round_, calls))
        with torch.no_grad():  # blocks record the graphs that they need
            for shift, (steps, transfers, second_parts, completed) in mine if early is None else mine.iterate(early):
                for part in (steps, second_parts) if second_parts else (steps,):
                    if self._threads is not None:
                        _run_together(self._threads, part, shift)
                    for call, worker, m in part if self._threads is None else ():
                        try:
                            call(worker, m + shift)
                        except Exception as error:
                            _locate(error, call, worker, m + shift)
                            raise
                    if transport is not None and transfers and part is steps:
                        self._exchange(transport, transfers, training)
                if self._on_completed is not None and completed is not None:
                    self._on_completed(completed + shift)
            for worker in self._workers.values():
                worker.drain()
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

    def _select(self, round_: Sequence[Step], calls: Mapping[Op, Call]) -> ProcessRound:
        """Return this process's part of a round."""
        mine = [step for step in round_ if step.stage in self._workers]
        if self._threads is not None:
            mine.sort(key=self._cost, reverse=True)
        steps = [(calls[step.op], self._workers[step.stage], step.microbatch) for step in mine]
        second_parts: Steps = [
            (Worker.backward_weights, worker, m) for call, worker, m in steps if call is Worker.backward and worker.stage.split
        ]
        completed = next((step.microbatch for step in round_ if step.stage == 0 and step.op is Op.BACKWARD), None)
        return steps, self._transport.transfers(round_) if self._transport is not None else (), second_parts, completed

    def _cost(self, step: Step) -> int:
        """Estimate the FLOPs of a step. The longest steps of a round start first, so that threads finish at about the same time."""
        return self._plan.stages[step.stage].flops * (1 if step.op is Op.FORWARD else 3)


def _run_together(threads: ThreadPoolExecutor, steps: Sequence[tuple[Call, Worker, int]], shift: int) -> None:
    """Run the steps of one round in threads. They don't depend on each other."""
    for future in [threads.submit(_step, call, worker, m + shift) for call, worker, m in steps]:
        future.result()


@torch.no_grad()
def _step(call: Call, worker: Worker, m: int) -> None:
    """Run one step in a thread."""
    try:
        call(worker, m)
    except Exception as error:
        _locate(error, call, worker, m)
        raise


def _locate(error: Exception, call: Call, worker: Worker, m: int) -> None:
    """Add a note to an exception that names stage, microbatch and pass."""
    operation = "evaluation" if call is Worker.evaluate else call.__name__
    error.add_note(f"in stage {worker.index + 1}, microbatch {m}, {operation}")


def _never() -> bool:
    return False


def stage_threads(concurrency: int, processes: int, device: torch.device) -> ThreadPoolExecutor | None:
    """Return a pool of threads that run ``concurrency`` stages at the same time, or None for one stage at a time.

    Each thread computes with as many threads as this one (``torch.get_num_threads``).

    Raises:
        ConfigError: If ``concurrency`` is not an integer >= 1, or is above 1 on a GPU or with several processes.
    """
    require(isinstance(concurrency, int) and concurrency >= 1, "concurrency", "an integer >= 1", concurrency)
    if concurrency == 1:
        return None
    alone = processes == 1 and device.type == "cpu"
    got = f"{concurrency} with {processes} process(es) on {device.type}"
    require(alone, "concurrency", "1, or several stages in one process on the CPU", got)
    return ThreadPoolExecutor(concurrency, "stage", torch.set_num_threads, (torch.get_num_threads(),))
