"""Records what each stage of this process does when. A pipeline that isn't recorded knows nothing of it."""

from __future__ import annotations

import platform
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist

from petra.diagnostics.events import Interval, Kind, split_waits
from petra.diagnostics.replacing import replace_method
from petra.engine.worker import Worker
from petra.pipeline import Pipeline
from petra.plan.schedule import in_flight
from petra.transport.local import LocalPort

Mark = tuple[int, Kind, int, Any, Any, int | None]
"""Of an interval: the start and the stop are times of the host, or events."""
WAITING = 1024
"""Marks of a GPU that :class:`StageTimes` lets wait before it looks which of them have come to pass."""


class Recorder:
    """Intervals of the stages of this process.

    On a GPU the marks are CUDA events on the stage's stream, read when recording has ended: the host never waits, and a receive
    lasts as long as it holds the stream up.

    Args:
        first: microbatches to record, from the pipeline's clock on; None for all.

    Attributes:
        intervals: of the recordings so far, in seconds on this machine's monotonic clock.
        held: for each stage the most bytes of inputs held between F and B.
    """

    def __init__(self, pipeline: Pipeline, first: int | None = None) -> None:
        self.pipeline = pipeline
        self.stop = float("inf") if first is None else pipeline.clock + first
        self.intervals: list[Interval] = []
        self.held: dict[int, int] = {}
        self._latest = 0  # microbatch gone forward: an exchange counts as its own
        self._marks: list[Mark] = []

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Records whatever the pipeline trains inside, evaluations left out."""
        train = self.pipeline.train

        def recorded(*arguments: Any, **named: Any) -> Any:
            if self.pipeline.clock >= self.stop:
                return train(*arguments, **named)
            with self.recording():
                return train(*arguments, **named)

        with ExitStack() as undo:
            replace_method(undo, self.pipeline, "train", recorded)
            yield

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Records inside, which may be no evaluation: its messages would count too."""
        origin = self._origin()
        last = len(self.pipeline.layout.stages) - 1
        with ExitStack() as undo:
            for j, worker in self.pipeline.workers.items():
                self._time(undo, worker.stage, "forward", j, Kind.FORWARD)
                self._time(undo, worker.stage, "backward", j, Kind.BACKWARD)
                self._time_updates(undo, worker, j)
                if worker.update.joined is not None:
                    self._time(undo, worker.update, "joined", j, Kind.SEND)
                for port, peer in ((worker.upstream, j - 1), (worker.downstream, j + 1)):
                    if isinstance(port, LocalPort):
                        continue  # references change hands
                    outside = peer if 0 <= peer <= last else None
                    self._time(undo, port, "receive", j, Kind.RECEIVE, outside)
                    self._time(undo, port, "send", j, Kind.LOSS if peer > last else Kind.SEND, outside)
            transport = self.pipeline._transport
            if transport is not None and self.pipeline.stages:
                self._time(undo, transport, "exchange", max(self.pipeline.stages), Kind.SEND)
            yield
        self._read(origin)

    def _time(self, undo: ExitStack, owner: Any, name: str, stage: int, kind: Kind, peer: int | None = None) -> None:
        """Replaces a method of one object until ``undo`` closes."""
        call: Callable[..., Any] = getattr(owner, name)
        note, mark, own, held = self._note, self._mark, self.pipeline.stages[stage], self.held

        def timed(*arguments: Any) -> Any:
            m = arguments[0] if isinstance(arguments[0], int) else self._latest
            if kind is Kind.FORWARD:
                self._latest = m
            if m >= self.stop:
                return call(*arguments)
            start = mark()
            result = call(*arguments)
            note((stage, kind, m, start, mark(), peer))
            if kind is Kind.FORWARD:
                held[stage] = max(held.get(stage, 0), own.held_bytes())
            return result

        replace_method(undo, owner, name, timed)

    def _time_updates(self, undo: ExitStack, worker: Worker, stage: int) -> None:
        updating = worker.stage.updating

        @contextmanager
        def timed() -> Iterator[None]:
            start = self._mark()
            with updating():
                yield
            if worker.t > self.stop:
                return
            self._note((stage, Kind.UPDATE, worker.t - 1, start, self._mark(), None))

        replace_method(undo, worker.stage, "updating", timed)

    def _note(self, mark: Mark) -> None:
        self._marks.append(mark)

    def _mark(self) -> Any:
        if self.pipeline.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _origin(self) -> tuple[Any, float]:
        """A mark and the host's time of it."""
        mark = self._mark()
        if isinstance(mark, float):
            return mark, mark
        mark.synchronize()
        return mark, time.perf_counter()

    def _read(self, origin: tuple[Any, float]) -> None:
        """Turns marks into intervals; on a GPU once the pipeline has drained."""
        event, host = origin
        if not isinstance(event, float):
            torch.cuda.synchronize(self.pipeline.device)

        def seconds(mark: Any) -> float:
            return mark if isinstance(mark, float) else host + event.elapsed_time(mark) / 1000

        self.intervals += [
            Interval(stage, kind, m, seconds(start), seconds(stop), peer) for stage, kind, m, start, stop, peer in self._marks
        ]
        self._marks.clear()


class StageTimes(Recorder):
    """Sums of the intervals of each stage, which take no more memory for a long epoch than for a short one."""

    def __init__(self, pipeline: Pipeline) -> None:
        super().__init__(pipeline)
        self._seconds: defaultdict[tuple[int, Kind], float] = defaultdict(float)
        self._data = 0.0

    def metrics(self) -> dict[str, float]:
        """Per stage of this process what was recorded since the last call, which then is forgotten."""
        seconds, method, k = self._seconds, self.pipeline.method, self.pipeline.k
        rows: dict[str, float] = {}
        for j in self.pipeline.stages:
            data = self._data if j == 0 else 0.0
            values = {
                "forward_seconds": seconds[j, Kind.FORWARD] + seconds[j, Kind.LOSS],
                "backward_seconds": seconds[j, Kind.BACKWARD],
                "update_seconds": seconds[j, Kind.UPDATE],
                "data_seconds": data,
                "waiting_seconds": seconds[j, Kind.RECEIVE] + seconds[j, Kind.SEND] - data,
                "in_flight": in_flight(self.pipeline.delays[j], k, method.flush),
                "staleness": method.staleness(self.pipeline.delays[j], k),
                "buffer_bytes": self.held.pop(j, 0),
            }
            rows |= {f"stage/{j + 1}/{name}": value for name, value in values.items()}
        self._seconds.clear()
        self._data = 0.0
        return rows

    def _note(self, mark: Mark) -> None:
        if isinstance(mark[3], float):
            self._add(mark, mark[4] - mark[3])
            return
        self._marks.append(mark)
        if len(self._marks) % WAITING == 0:
            done = next((i for i, (*_, stop, _) in enumerate(self._marks) if not stop.query()), len(self._marks))
            self._add_up(done)

    def _read(self, origin: tuple[Any, float]) -> None:
        if self._marks:
            torch.cuda.synchronize(self.pipeline.device)
            self._add_up(len(self._marks))

    def _add_up(self, count: int) -> None:
        for mark in self._marks[:count]:
            self._add(mark, mark[3].elapsed_time(mark[4]) / 1000)
        del self._marks[:count]

    def _add(self, mark: Mark, seconds: float) -> None:
        stage, kind, _, _, _, peer = mark
        self._seconds[stage, kind] += seconds
        if stage == 0 and kind is Kind.RECEIVE and peer is None:
            self._data += seconds


def clock_offset(rounds: int = 9) -> float:
    """Seconds to add to this process's clock to have that of rank 0; every process makes the call.

    Processes of one machine share the clock. Others ask ``rounds`` times; the error is below half of the quickest answer
    (Cristian 1989).
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return 0.0
    machines: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(machines, platform.node())
    rank, best, offset = dist.get_rank(), float("inf"), 0.0
    token = torch.zeros(1, dtype=torch.float64)
    for other in (r for r, machine in enumerate(machines) if machine != machines[0]):
        for _ in range(rounds):
            if rank == other:
                sent = time.perf_counter()
                dist.send(token, 0)
                dist.recv(token, 0)
                answered = time.perf_counter()
                if answered - sent < best:
                    best, offset = answered - sent, float(token) - (sent + answered) / 2
            elif rank == 0:
                dist.recv(token, other)
                token[0] = time.perf_counter()
                dist.send(token, other)
    return offset


def gathered_intervals(intervals: list[Interval]) -> list[Interval]:
    """The intervals of all processes on rank 0's clock, in every process."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return split_waits(intervals)
    offset = clock_offset()
    own = [i._replace(start=i.start + offset, stop=i.stop + offset) for i in intervals]
    parts: list[list[Interval]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(parts, own)
    return split_waits([interval for part in parts for interval in part])
