"""Records when each stage computes and communicates: intervals of all processes on one clock, or sums for stage metrics."""

from __future__ import annotations

import platform
import time
from collections import defaultdict
from typing import Any

import torch
import torch.distributed as dist

from petra.diagnostics.events import Interval, Kind, split_waits
from petra.distributed import all_gather_objects, message_group
from petra.hooks import Hook
from petra.pipeline import Pipeline
from petra.specs import Message, Streams

MAX_PENDING = 1024
"""Intervals between CUDA events that are collected before the timer checks which of them have completed."""


class Recorder(Hook):
    """Record the intervals of this process's stages while it trains.

    On a GPU, times are CUDA events, so the host waits only at the begin and the end of a run, and the duration of a receive is the
    time for which the CUDA stream waits. Messages between stages of one process are not timed, because they are passed by
    reference.

    Args:
        first: Number of microbatches to record, from the pipeline's clock on; None records all.

    Attributes:
        intervals: Intervals of the training runs so far, in seconds of this machine's monotonic clock.
    """

    def __init__(self, pipeline: Pipeline, first: int | None = None) -> None:
        self.pipeline = pipeline
        self.stop = float("inf") if first is None else pipeline.microbatches_done + first
        self._stages = len(pipeline.plan.layout.stages)
        self.intervals: list[Interval] = []
        self._latest = 0
        self._starts: dict[int, Any] = {}  # Intervals of a stage don't overlap.
        self._pending: list[Interval] = []  # with CUDA events as times
        self._origin: tuple[Any, float]  # a CUDA event and its time in seconds

    def add(self, interval: Interval) -> None:
        """Store a finished interval."""
        self.intervals.append(interval)

    def now(self) -> Any:
        """Return the host's time, or a CUDA event recorded on the current CUDA stream."""
        if self.pipeline.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def train_begin(self, start: int, stop: int) -> None:
        self._latest = start
        self._pending.clear()
        event = self.now() if start < self.stop else 0.0
        if not isinstance(event, float):
            event.synchronize()
            self._origin = event, time.perf_counter()

    def train_end(self) -> None:
        if self._pending:
            torch.cuda.synchronize(self.pipeline.device)
            self._add_pending(len(self._pending))

    def forward_begin(self, stage: int, m: int, x: Streams) -> None:
        self._latest = m
        self._begin(stage, m)

    def forward_end(self, stage: int, m: int, y: Streams) -> None:
        self._end(stage, Kind.FORWARD, m)

    def backward_begin(self, stage: int, m: int, y: Streams, dy: Streams) -> None:
        self._begin(stage, m)

    def backward_end(self, stage: int, m: int, x: Streams, dx: Streams) -> None:
        self._end(stage, Kind.BACKWARD, m)

    def update_begin(self, stage: int, m: int) -> None:
        self._begin(stage, m)

    all_reduce_begin = update_begin

    def update_end(self, stage: int, m: int) -> None:
        self._end(stage, Kind.UPDATE, m)

    def all_reduce_end(self, stage: int, m: int) -> None:
        self._end(stage, Kind.SEND, m)

    def receive_begin(self, stage: int, peer: int, m: int) -> None:
        self._begin(stage, m, peer)

    def receive_end(self, stage: int, peer: int, m: int, message: Message) -> None:
        self._end(stage, Kind.RECEIVE, m, peer)

    def send_begin(self, stage: int, peer: int, m: int, message: Message) -> None:
        self._begin(stage, m, peer)

    def send_end(self, stage: int, peer: int, m: int, message: Message) -> None:
        self._end(stage, Kind.LOSS if peer == self._stages else Kind.SEND, m, peer)

    def exchange_begin(self, stage: int) -> None:
        self._begin(stage, self._latest)

    def exchange_end(self, stage: int) -> None:
        # An exchange carries messages of several microbatches; it counts as part of the latest forward's.
        self._end(stage, Kind.SEND, self._latest)

    def _begin(self, stage: int, m: int, peer: int | None = None) -> None:
        if m < self.stop and peer not in self.pipeline.workers:
            self._starts[stage] = self.now()

    def _end(self, stage: int, kind: Kind, m: int, peer: int | None = None) -> None:
        if m >= self.stop or peer in self.pipeline.workers:
            return
        other = peer if peer is not None and 0 <= peer < self._stages else None
        interval = Interval(stage, kind, m, self._starts[stage], self.now(), other)
        if isinstance(interval.start, float):
            self.add(interval)
            return
        self._pending.append(interval)
        if len(self._pending) % MAX_PENDING == 0:
            completed = (i for i, pending in enumerate(self._pending) if not pending.stop.query())
            self._add_pending(next(completed, len(self._pending)))

    def _add_pending(self, count: int) -> None:
        for pending in self._pending[:count]:
            event, seconds = self._origin
            start, stop = (seconds + event.elapsed_time(mark) / 1000 for mark in (pending.start, pending.stop))
            self.add(pending._replace(start=start, stop=stop))
            self._origin = pending.stop, stop  # close to the next ones: elapsed times are float32
        del self._pending[:count]


class StageTimes(Recorder):
    """Sum the intervals of each stage instead of storing them. Memory does not grow with the number of microbatches."""

    def __init__(self, pipeline: Pipeline) -> None:
        super().__init__(pipeline)
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

    def add(self, interval: Interval) -> None:
        seconds = interval.stop - interval.start
        self._seconds[interval.stage, interval.kind] += seconds
        if interval.stage == 0 and interval.kind is Kind.RECEIVE and interval.peer is None:
            self._data += seconds


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
    group = message_group()
    rank, shortest, offset = dist.get_rank(), float("inf"), 0.0
    token = torch.zeros(1, dtype=torch.float64)
    for other in (r for r, machine in enumerate(machines) if machine != machines[0]):
        for _ in range(rounds):
            if rank == other:
                sent = time.perf_counter()
                dist.send(token, 0, group)
                dist.recv(token, 0, group)
                answered = time.perf_counter()
                if answered - sent < shortest:
                    shortest, offset = answered - sent, float(token) - (sent + answered) / 2
            elif rank == 0:
                dist.recv(token, other, group)
                token[0] = time.perf_counter()
                dist.send(token, other, group)
    return offset
