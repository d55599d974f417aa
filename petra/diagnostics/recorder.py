"""Records when each stage computes and communicates, and gathers the records of all processes on one clock."""

from __future__ import annotations

import platform
import time
from typing import Any

import torch
import torch.distributed as dist

from petra.diagnostics.events import Interval, split_waits
from petra.diagnostics.timing import Mark, StageTimer
from petra.distributed import all_gather_objects
from petra.pipeline import Pipeline


class Recorder(StageTimer):
    """Record the intervals of this process's stages while it trains.

    Args:
        first: Number of microbatches to record, from the pipeline's clock on; None records all.

    Attributes:
        intervals: Intervals of the training runs so far, in seconds of this machine's monotonic clock.
    """

    def __init__(self, pipeline: Pipeline, first: int | None = None) -> None:
        super().__init__(pipeline, first)
        self.intervals: list[Interval] = []
        self._marks: list[Mark] = []
        self._origin: tuple[Any, float] | None = None

    def add(self, mark: Mark) -> None:
        self._marks.append(mark)

    def train_begin(self, start: int, stop: int) -> None:
        super().train_begin(start, stop)
        if start >= self.stop:
            return
        self._marks.clear()
        event = self.now()
        if not isinstance(event, float):
            event.synchronize()
        self._origin = event, time.perf_counter()

    def train_end(self) -> None:
        """Turn marks into intervals; on a GPU this waits for the device."""
        if self._origin is None:
            return
        (event, host), self._origin = self._origin, None
        if not isinstance(event, float):
            torch.cuda.synchronize(self.pipeline.device)

        def seconds(mark: Any) -> float:
            return mark if isinstance(mark, float) else host + event.elapsed_time(mark) / 1000

        self.intervals += [
            Interval(stage, kind, m, seconds(start), seconds(stop), peer) for stage, kind, m, start, stop, peer in self._marks
        ]
        self._marks.clear()


def gathered_intervals(intervals: list[Interval]) -> list[Interval]:
    """Return the intervals of all processes on rank 0's clock. Every process must call this and gets the same list."""
    offset = clock_offset()
    own = [i._replace(start=i.start + offset, stop=i.stop + offset) for i in intervals]
    return split_waits([interval for part in all_gather_objects(own) for interval in part])


def clock_offset(rounds: int = 9) -> float:
    """Return the seconds to add to this process's clock to get rank 0's. Every process must call this function.

    Processes of rank 0's machine share its clock. Every other process asks rank 0 for the time ``rounds`` times; the error is
    below half of the shortest round trip (Cristian 1989).
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return 0.0
    machines: list[str] = all_gather_objects(platform.node())
    rank, shortest, offset = dist.get_rank(), float("inf"), 0.0
    token = torch.zeros(1, dtype=torch.float64)
    for other in (r for r, machine in enumerate(machines) if machine != machines[0]):
        for _ in range(rounds):
            if rank == other:
                sent = time.perf_counter()
                dist.send(token, 0)
                dist.recv(token, 0)
                answered = time.perf_counter()
                if answered - sent < shortest:
                    shortest, offset = answered - sent, float(token) - (sent + answered) / 2
            elif rank == 0:
                dist.recv(token, other)
                token[0] = time.perf_counter()
                dist.send(token, other)
    return offset
