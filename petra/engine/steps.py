"""How a process runs its steps of a round if not in turn: in threads, or with forward beside backward in two threads."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import ClassVar, NamedTuple

import torch

from petra.engine.worker import Worker
from petra.errors import require
from petra.plan.timetable import Op
from petra.transport import Port

Ports = Mapping[int, tuple[Port, Port]]
"""Upstream and downstream port of each stage."""


class BoundStep(NamedTuple):
    """A forward or backward of one microbatch, or a forward in evaluation, on a stage of this process.

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

    def run(self) -> None:
        """Run the step in this thread."""
        self.located(lambda: self.call(self.microbatch))

    def located(self, part: Callable[[], None]) -> None:
        """Call a part of the step. Exceptions get a note that names stage, microbatch and pass."""
        try:
            with torch.no_grad():  # blocks record the graphs that they need
                part()
        except Exception as error:
            self.locate(error)
            raise

    def locate(self, error: Exception) -> None:
        """Add a note to an exception that names stage, microbatch and pass."""
        operation = "evaluation" if self.call.__name__ == "evaluate" else self.call.__name__
        error.add_note(f"in stage {self.worker.index + 1}, microbatch {self.microbatch}, {operation}")


class StepRunner(ABC):
    """Runs the steps of this process, round by round. Steps of one round do not depend on each other.

    Attributes:
        looks_ahead: Whether :meth:`run` uses ``following``.
    """

    looks_ahead: ClassVar[bool] = False

    @abstractmethod
    def run(self, steps: Sequence[BoundStep], following: Sequence[BoundStep]) -> None:
        """Run the steps of a round.

        Args:
            steps: The steps.
            following: The steps of the next round, if the runner looks ahead.
        """

    def ports(self, ports: Ports) -> Ports:
        """Return the upstream and the downstream port of each stage as steps use them."""
        return ports


class InThreads(StepRunner):
    """Runs the steps of a round at the same time, in a pool of threads. The longest steps start first."""

    def __init__(self, threads: ThreadPoolExecutor, cost: Callable[[BoundStep], float]) -> None:
        self._threads, self._cost = threads, cost

    def run(self, steps: Sequence[BoundStep], following: Sequence[BoundStep]) -> None:
        """See :meth:`StepRunner.run`."""
        for future in [self._threads.submit(step.run) for step in sorted(steps, key=self._cost, reverse=True)]:
            future.result()


class Overlapped(StepRunner):
    """Runs the backward of a stage beside the forward of the round before, in threads of its own. The update comes after both.

    The backward receives its message, computes and sends in the other thread. Forward and backward of a stage share no state that
    one of them changes: the forward evaluates a copy of each block that shares its parameters' memory
    (:mod:`petra.engine.twin`), messages of each direction have their own port, and accumulated gradients belong to the backward.

    Args:
        stages: Stages that overlap (:func:`petra.plan.overlap.overlapped_stages`).
        threads: Threads for backwards.
        others: Runs all other steps; None runs them in turn.
    """

    looks_ahead = True

    def __init__(self, stages: Sequence[int], threads: ThreadPoolExecutor, others: StepRunner | None) -> None:
        self._stages, self._threads, self._others = frozenset(stages), threads, others
        self._started: dict[int, Future[None]] = {}

    def run(self, steps: Sequence[BoundStep], following: Sequence[BoundStep]) -> None:
        """See :meth:`StepRunner.run`."""
        running, self._started = self._started, {}
        forwards = {step.worker.index for step in steps if step.op is Op.FORWARD}
        for step in following:
            if step.op is Op.BACKWARD and step.worker.index in forwards & self._stages:
                call = _propagation(step)
                self._started[step.worker.index] = self._threads.submit(step.located, call)
        try:
            for step in steps:
                if step.op is Op.BACKWARD and (future := running.get(step.worker.index)) is not None:
                    future.result()
                    step.located(step.worker.count_and_update)
            left = [step for step in steps if step.op is Op.FORWARD or step.worker.index not in running]
            if self._others is not None:
                self._others.run(left, ())
            else:
                for step in left:
                    step.run()
        except BaseException:
            wait([*running.values(), *self._started.values()])
            self._started.clear()
            raise


def _propagation(step: BoundStep) -> Callable[[], None]:
    return lambda: step.worker.propagate(step.microbatch)


def compute_threads(count: int, name: str) -> ThreadPoolExecutor:
    """Return a pool of threads, each of which computes with as many threads as this one (``torch.get_num_threads``)."""
    return ThreadPoolExecutor(count, name, torch.set_num_threads, (torch.get_num_threads(),))


def require_concurrency(concurrency: int, processes: int, device: torch.device) -> None:
    """Check the number of stages that run at the same time in threads.

    Raises:
        ConfigError: If it is not an integer >= 1, or is above 1 on a GPU or with several processes.
    """
    require(isinstance(concurrency, int) and concurrency >= 1, "concurrency", "an integer >= 1", concurrency)
    alone = processes == 1 and device.type == "cpu"
    got = f"{concurrency} with {processes} process(es) on {device.type}"
    require(concurrency == 1 or alone, "concurrency", "1, or several stages in one process on the CPU", got)
