"""Recorded intervals of stages: complete, in order, and without effect on training."""

from __future__ import annotations

import json
from itertools import count
from pathlib import Path

import pytest
import torch

from docs.schedules import main
from petra.analysis.timeline import write_timeline
from petra.diagnostics import recorder as recording
from petra.diagnostics.events import Interval, Kind, split_waits
from petra.diagnostics.recorder import Recorder, StageTimes, clock_offset, gathered_intervals
from petra.settings import Runtime
from tests.cost_model.test_simulator import seconds_by_kind
from tests.support.commands import refused
from tests.support.nets import RandomSource, mixed
from tests.support.processes import run_processes


def test_only_the_first_microbatches() -> None:
    pipeline = mixed()
    with pipeline.hooks.attached(Recorder(pipeline, first=4)) as recorder:
        for _ in range(3):
            pipeline.train(RandomSource(), 3)
    assert {i.microbatch for i in recorder.intervals} == {0, 1, 2, 3}


class Event:
    """A CUDA event, in milliseconds, that the device has passed."""

    def __init__(self, moment: float) -> None:
        self.moment = moment

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: Event) -> float:
        return end.moment - self.moment


@pytest.mark.parametrize("events", [False, True])
def test_sums_equal_the_intervals_without_storing_them(events: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Events are read in groups, and the last ones at the end."""
    monkeypatch.setattr(recording, "MAX_PENDING", 8)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    found = []
    for build in (Recorder, StageTimes):
        clock = count()
        monkeypatch.setattr(recording.time, "perf_counter", lambda clock=clock: float(next(clock)))
        pipeline = mixed(k=2, stages=3)
        timer = build(pipeline)
        if events:
            monkeypatch.setattr(timer, "now", lambda clock=clock: Event(float(next(clock))))
        with pipeline.hooks.attached(timer):
            pipeline.train(RandomSource(), 9)
        assert not timer._pending
        found.append(timer)
    recorder, times = found
    assert isinstance(times, StageTimes)
    assert not times.intervals
    assert [(i.stop - i.start) * (1000 if events else 1) for i in recorder.intervals] == pytest.approx(
        [1.0] * len(recorder.intervals)
    )
    seconds, rows = seconds_by_kind(recorder.intervals), times.metrics()
    for j in range(3):
        data = sum(i.stop - i.start for i in recorder.intervals if i.kind is Kind.RECEIVE and i.stage == j == 0)
        expected = {
            "forward": seconds[j, Kind.FORWARD] + seconds[j, Kind.LOSS],
            "backward": seconds[j, Kind.BACKWARD],
            "update": seconds[j, Kind.UPDATE],
            "data": data,
            "waiting": seconds[j, Kind.RECEIVE] + seconds[j, Kind.SEND] - data,
        }
        assert {name: rows[f"stage/{j + 1}/{name}_seconds"] for name in expected} == pytest.approx(expected)
        assert all(expected[name] > 0 for name in ("forward", "backward", "update"))
        assert (data > 0) == (j == 0)


def test_receive_is_split_where_its_message_left() -> None:
    send = Interval(0, Kind.SEND, 3, 1.0, 2.0, 1)
    receive = Interval(1, Kind.RECEIVE, 3, 0.5, 2.5, 0)
    other = Interval(1, Kind.RECEIVE, 4, 2.6, 2.7, 0)
    assert split_waits([send, receive, other]) == [
        send,
        Interval(1, Kind.WAIT, 3, 0.5, 2.0, 0),
        Interval(1, Kind.RECEIVE, 3, 2.0, 2.5, 0),
        other,
    ]


def recorded(rank: int, transport: str) -> tuple[list[Interval], float, dict[str, float]]:
    pipeline = mixed(runtime=Runtime(transport=transport), stages=3)
    recorder, times = Recorder(pipeline), StageTimes(pipeline)
    pipeline.measures.append(times.metrics)
    with pipeline.hooks.attached(recorder), pipeline.hooks.attached(times):
        pipeline.train(RandomSource(), 6)
    found = gathered_intervals(recorder.intervals)
    return found, clock_offset(), pipeline.stage_metrics()


@pytest.mark.processes
def test_all_processes_in_one_trace(tmp_path: Path) -> None:
    (found, _, metrics), (same, offset, _) = run_processes(2, recorded, tmp_path, "edge")
    assert found == same
    assert offset == 0
    assert {i.stage for i in found} == {0, 1, 2}
    assert {"stage/1/waiting_seconds", "stage/3/waiting_seconds"} <= metrics.keys()
    ends = {(i.kind, i.stage, i.microbatch): i for i in found}
    for m in range(6):
        for j in (0, 1):
            assert ends[Kind.FORWARD, j, m].stop <= ends[Kind.FORWARD, j + 1, m].start
            assert ends[Kind.BACKWARD, j + 1, m].stop <= ends[Kind.BACKWARD, j, m].start
    write_timeline(found, tmp_path, "two processes")
    trace = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    slices = [event for event in trace if event["ph"] == "X"]
    assert len(slices) == len(found)
    assert sum(event["name"] == "F3" for event in slices) == 3
    starts, finishes = ({e["id"] for e in trace if e["ph"] == phase} for phase in "sf")
    assert len(starts & finishes) >= 2 * 6
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (tmp_path / "timeline.svg").read_text()


def test_a_schedule_without_stages_is_refused() -> None:
    """Those of the pages are drawn by tests/test_docs.py."""
    assert refused(main, ["--stages", "0"]) == "--stages: expected an integer >= 1, got 0"
