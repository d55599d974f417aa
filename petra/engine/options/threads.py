"""Threads: several stages of one process compute at the same time, on the CPU."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

import torch

from petra.engine.executor import BoundStep, ProcessRound, in_turn
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
