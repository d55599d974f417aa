"""Measures when each stage of this process computes and communicates. The base of recorder and stage metrics."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import torch

from petra.diagnostics.events import Kind
from petra.hooks import Hook
from petra.pipeline import Pipeline
from petra.specs import Message, Streams


class Mark(NamedTuple):
    """An interval whose ``start`` and ``stop`` are host times in seconds, or CUDA events."""

    stage: int
    kind: Kind
    microbatch: int
    start: Any
    stop: Any
    peer: int | None


class StageTimer(Hook):
    """Pass a mark of each finished interval to :meth:`add`.

    On a GPU, marks are CUDA events, so the host never waits, and the duration of a receive is the time for which the CUDA stream
    waits. Messages between stages of one process are not timed, because they are passed by reference.

    Args:
        first: Number of microbatches to time, counted from the pipeline's clock; None times all.
    """

    def __init__(self, pipeline: Pipeline, first: int | None = None) -> None:
        self.pipeline = pipeline
        self.stop = float("inf") if first is None else pipeline.microbatches_done + first
        self._stages = len(pipeline.plan.layout.stages)
        self._latest = 0
        self._starts: dict[int, Any] = {}  # Intervals of a stage don't overlap.

    def add(self, mark: Mark) -> None:
        """Take a finished interval."""
        raise NotImplementedError

    def now(self) -> Any:
        """Return the host's time, or a CUDA event recorded on the current CUDA stream."""
        if self.pipeline.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def train_begin(self, start: int, stop: int) -> None:
        self._latest = start

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
        if peer not in self.pipeline.workers:
            self._begin(stage, m)

    def receive_end(self, stage: int, peer: int, m: int, message: Message) -> None:
        if peer not in self.pipeline.workers:
            self._end(stage, Kind.RECEIVE, m, peer)

    def send_begin(self, stage: int, peer: int, m: int, message: Message) -> None:
        if peer not in self.pipeline.workers:
            self._begin(stage, m)

    def send_end(self, stage: int, peer: int, m: int, message: Message) -> None:
        if peer not in self.pipeline.workers:
            self._end(stage, Kind.LOSS if peer == self._stages else Kind.SEND, m, peer)

    def exchange_begin(self, stage: int) -> None:
        self._begin(stage, self._latest)

    def exchange_end(self, stage: int) -> None:
        # An exchange carries messages of several microbatches; it counts as part of the latest forward's.
        self._end(stage, Kind.SEND, self._latest)

    def _begin(self, stage: int, m: int) -> None:
        if m < self.stop:
            self._starts[stage] = self.now()

    def _end(self, stage: int, kind: Kind, m: int, peer: int = -1) -> None:
        if m < self.stop:
            start = self._starts[stage]
            self.add(Mark(stage, kind, m, start, self.now(), peer if 0 <= peer < self._stages else None))
