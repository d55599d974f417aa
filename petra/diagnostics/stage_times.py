"""Sums of the seconds that each stage computes, communicates and waits: stage metrics of a training run."""

from __future__ import annotations

from collections import defaultdict

import torch

from petra.diagnostics.events import Kind
from petra.diagnostics.timing import Mark, StageTimer
from petra.pipeline import Pipeline
from petra.specs import Streams

MAX_PENDING = 1024
"""CUDA marks that :class:`StageTimes` collects before it checks which of them have completed."""


class StageTimes(StageTimer):
    """Sum the intervals of each stage. Memory does not grow with the number of microbatches."""

    def __init__(self, pipeline: Pipeline) -> None:
        super().__init__(pipeline)
        self._pending: list[Mark] = []
        self._seconds: defaultdict[tuple[int, Kind], float] = defaultdict(float)
        self._data = 0.0
        self._buffer_bytes: dict[int, int] = {}

    def metrics(self) -> dict[str, float]:
        """Return the sums of this process's stages since the last call as ``stage/<j>/<name>`` with j from 1, and reset them.

        ``buffer_bytes`` is the largest size of the inputs that a stage stored between forward and backward.
        """
        seconds, rows = self._seconds, dict[str, float]()
        for j in self.pipeline.stages:
            planned, data = self.pipeline.plan.stages[j], self._data if j == 0 else 0.0
            values = {
                "forward_seconds": seconds[j, Kind.FORWARD] + seconds[j, Kind.LOSS],
                "backward_seconds": seconds[j, Kind.BACKWARD],
                "update_seconds": seconds[j, Kind.UPDATE],
                "data_seconds": data,
                "waiting_seconds": seconds[j, Kind.RECEIVE] + seconds[j, Kind.SEND] - data,
                "in_flight": planned.in_flight,
                "buffer_bytes": self._buffer_bytes.pop(j, 0),
            }
            rows |= {f"stage/{j + 1}/{name}": value for name, value in values.items()}
        self._seconds.clear()
        self._data = 0.0
        return rows

    def forward_end(self, stage: int, m: int, y: Streams) -> None:
        super().forward_end(stage, m, y)
        self._buffer_bytes[stage] = max(self._buffer_bytes.get(stage, 0), self.pipeline.stages[stage].stored_bytes())

    def train_end(self) -> None:
        if self._pending:
            torch.cuda.synchronize(self.pipeline.device)
            self._sum_pending(len(self._pending))

    def add(self, mark: Mark) -> None:
        if isinstance(mark.start, float):
            self._sum(mark, mark.stop - mark.start)
            return
        self._pending.append(mark)
        if len(self._pending) % MAX_PENDING == 0:
            completed = next((i for i, mark in enumerate(self._pending) if not mark.stop.query()), len(self._pending))
            self._sum_pending(completed)

    def _sum_pending(self, count: int) -> None:
        for mark in self._pending[:count]:
            self._sum(mark, mark.start.elapsed_time(mark.stop) / 1000)
        del self._pending[:count]

    def _sum(self, mark: Mark, seconds: float) -> None:
        self._seconds[mark.stage, mark.kind] += seconds
        if mark.stage == 0 and mark.kind is Kind.RECEIVE and mark.peer is None:
            self._data += seconds
