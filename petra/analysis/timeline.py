"""Timelines of recorded and simulated runs, as a trace for Perfetto or chrome://tracing and as a figure."""

from __future__ import annotations

import json
from collections.abc import Sequence
from math import inf, isfinite
from pathlib import Path

from petra.analysis.plots import PASSES, save, timeline
from petra.diagnostics.events import Interval, Kind
from petra.errors import DataError, first_line, require


def write_trace(intervals: Sequence[Interval], path: Path, processes: Sequence[Sequence[int]] = ()) -> None:
    """Write the intervals of all stages as a file in Chrome's trace format. Arrows connect each send with its receive.

    Times in the file are in microseconds from the first interval.

    Args:
        processes: Stages of each process; by default, one process has all.
    """
    origin = min((i.start for i in intervals), default=0.0)
    owners = {stage: process for process, stages in enumerate(processes) for stage in stages}
    events: list[dict[str, object]] = []
    for stage in sorted({i.stage for i in intervals}):
        at = {"ph": "M", "pid": owners.get(stage, 0), "tid": stage}
        events.append({"name": "process_name", "args": {"name": f"process {at['pid']}"}, **at})
        events.append({"name": "thread_name", "args": {"name": f"stage {stage + 1}"}, **at})
        events.append({"name": "thread_sort_index", "args": {"sort_index": stage}, **at})
    message_ids: dict[tuple[int, int, int], int] = {}
    for i in sorted(intervals, key=lambda i: i.start):
        place = {"pid": owners.get(i.stage, 0), "tid": i.stage, "ts": 1e6 * (i.start - origin)}
        name = f"{i.kind}{i.microbatch}" if i.kind in PASSES else str(i.kind)
        arguments = {"microbatch": i.microbatch}
        events.append({"name": name, "cat": str(i.kind), "ph": "X", "dur": 1e6 * (i.stop - i.start), "args": arguments, **place})
        if i.peer is not None and i.kind in (Kind.SEND, Kind.RECEIVE):
            sends = i.kind is Kind.SEND
            message = (i.stage, i.peer, i.microbatch) if sends else (i.peer, i.stage, i.microbatch)
            message_id = message_ids.setdefault(message, len(message_ids))
            binding = {} if sends else {"bp": "e"}
            phase = "s" if sends else "f"
            events.append({"name": "message", "cat": "message", "ph": phase, "id": message_id, **binding, **place})
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}) + "\n", encoding="utf-8")


def read_trace(path: Path) -> tuple[list[Interval], list[list[int]]]:
    """Return the intervals of a file that :func:`write_trace` wrote, without their peers, and the stages of each process.

    Raises:
        DataError: If the file can't be read or has another format.
    """
    try:
        events = [event for event in json.loads(path.read_text(encoding="utf-8"))["traceEvents"] if event["ph"] == "X"]
        processes: dict[int, set[int]] = {}
        intervals = []
        for event in events:
            start = event["ts"] / 1e6
            processes.setdefault(event["pid"], set()).add(event["tid"])
            stop = start + event["dur"] / 1e6
            require(isfinite(start) and start <= stop < inf, str(path), "times that are numbers", f"{start} to {stop}", DataError)
            intervals.append(Interval(event["tid"], Kind(event["cat"]), event["args"]["microbatch"], start, stop))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path}: can't be read as a trace ({type(error).__name__}: {first_line(error)})") from error
    return intervals, [sorted(processes[process]) for process in sorted(processes)]


def write_timeline(intervals: Sequence[Interval], folder: Path, title: str, processes: Sequence[Sequence[int]] = ()) -> None:
    """Write ``trace.json``, ``timeline.png`` and ``timeline.svg``. ``processes`` are the stages of each process."""
    write_trace(intervals, folder / "trace.json", processes)
    save(timeline(intervals, title, processes=processes), folder / "timeline.png", folder / "timeline.svg")
