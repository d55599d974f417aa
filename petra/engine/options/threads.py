"""Threads: several stages of one process compute at the same time, on the CPU."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

import torch

from petra.engine.executor import BoundStep, ProcessRound, in_turn
from petra.errors import require
from petra.plan import Plan


class InThreads:
    """Strategy of the executor: runs the steps of a round at the same time. The longest start first, so that threads finish
    at about the same time.

    Args:
        plan: Plan of the run.
        concurrency: Number of threads. Each computes with as many threads as this one (``torch.get_num_threads``).
    """

    def __init__(self, plan: Plan, concurrency: int) -> None:
        threads = torch.get_num_threads()

        def prepare() -> None:
            torch.set_num_threads(threads)
            torch.set_grad_enabled(False)  # blocks record the graphs that they need

        self._flops = [stage.flops for stage in plan.stages]
        self._threads = ThreadPoolExecutor(concurrency, "stage", prepare)

    def __call__(self, rounds: Iterable[ProcessRound]) -> Iterator[ProcessRound]:
        """Run the steps of rounds, and yield each round after its steps."""
        for round_ in rounds:
            steps = sorted(round_.steps, key=self._cost, reverse=True)
            for future in [self._threads.submit(next, in_turn([round_._replace(steps=[step])])) for step in steps]:
                future.result()
            yield round_

    def _cost(self, step: BoundStep) -> int:
        return self._flops[step.worker.index] * (3 if step.method == "backward" else 1)


def check_concurrency(plan: Plan, concurrency: int, device: torch.device) -> None:
    """Check the number of stages that run at the same time in threads.

    Raises:
        ConfigError: If it is not an integer >= 1, or is above 1 on a GPU or with several processes.
    """
    require(isinstance(concurrency, int) and concurrency >= 1, "concurrency", "an integer >= 1", concurrency)
    processes = plan.layout.dp * len(plan.layout.processes)
    alone = processes == 1 and device.type == "cpu"
    got = f"{concurrency} with {processes} process(es) on {device.type}"
    require(concurrency == 1 or alone, "concurrency", "1, or several stages in one process on the CPU", got)
