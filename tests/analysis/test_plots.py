"""Figures: what they show, that nothing covers it."""

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from petra.analysis.plots import Panel, grid, svg, timeline
from petra.analysis.timeline import read_trace, write_trace
from petra.diagnostics.events import Interval, Kind
from petra.errors import DataError


def schedule(stages: int, microbatches: int) -> list[Interval]:
    """Return bars of length 1 and 2, one after the other."""
    found, clock = [], 0.0
    for m in range(microbatches):
        for stage in range(stages):
            found += [Interval(stage, Kind.FORWARD, m, clock, clock + 1), Interval(stage, Kind.BACKWARD, m, clock + 1, clock + 3)]
            clock += 3
    return found


def test_a_trace_is_read_back(tmp_path: Path) -> None:
    intervals = schedule(4, 3)
    write_trace(intervals, tmp_path / "trace.json", [range(1), range(1, 4)])
    found, processes = read_trace(tmp_path / "trace.json")
    assert processes == [[0], [1, 2, 3]]
    assert [(i.stage, i.kind, i.microbatch) for i in found] == [(i.stage, i.kind, i.microbatch) for i in intervals]
    assert [i.stop for i in found] == pytest.approx([i.stop for i in intervals])
    late = '{"ph": "X", "ts": 0, "dur": -1, "pid": 0, "tid": 0, "cat": "F", "args": {"microbatch": 0}}'
    for event, message in (('{"ph": "X"}', r"can't be read as a trace \(KeyError"), (late, "expected times that are numbers")):
        (tmp_path / "trace.json").write_text(f'{{"traceEvents": [{event}]}}')
        with pytest.raises(DataError, match=f"trace.json: {message}"):
            read_trace(tmp_path / "trace.json")


def test_pictures_of_a_page_take_its_colours_and_need_nothing_else() -> None:
    for text in (svg(grid([Panel("epoch", "loss < 1 & more", {"test": [(1, 2.0), (2, 1.0)]})])), svg(timeline(schedule(10, 24)))):
        ElementTree.fromstring(text)
        assert "#000000" not in text
        assert "currentColor" in text
        assert not re.search(r'(?:href|src)="(?!#)', text)
