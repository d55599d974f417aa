"""Figures: what they show, that nothing covers it."""

import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from matplotlib import rcParams

from petra.analysis.plots import Panel, grid, svg, timeline
from petra.analysis.timeline import read_trace, write_trace
from petra.diagnostics.events import Interval, Kind
from petra.errors import DataError
from tests.support.processes import PIPES, environment


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


@pytest.mark.parametrize("count", [2, 40])
def test_a_single_diagram_keeps_its_width_with_a_legend(count: int) -> None:
    """The legend is below the axes and inside the figure: on a phone, a figure is as wide as the screen."""
    alone = grid([Panel("epoch", "loss", {"stage 0": [(1, 2.0)]})], columns=1)
    figure = grid([Panel("epoch", "loss", {f"stage {j}": [(1, 2.0)] for j in range(count)})], columns=1)
    figure.draw_without_rendering()
    (legend,), (axes,) = figure.legends, figure.axes
    box = legend.get_window_extent()
    assert figure.get_figwidth() == alone.get_figwidth()
    assert 0 <= box.y0 < box.y1 <= axes.get_tightbbox().y0
    assert box.x0 >= 0
    assert box.x1 <= figure.bbox.width
    assert axes.get_window_extent().height > 0.6 * figure.bbox.height * alone.get_figheight() / figure.get_figheight()


@pytest.mark.processes
@pytest.mark.parametrize("backend", ["module://matplotlib_inline.backend_inline", "nosuch"])
def test_drawing_does_not_depend_on_the_backend_of_a_notebook(backend: str, tmp_path: Path) -> None:
    """The variable is checked when matplotlib is imported first, in a new process."""
    code = "from petra.analysis.plots import *; save(grid([Panel('epoch', 'loss', {'a': [(1, 2.0)]})]), Path('x.png'))"
    (tmp_path / "matplotlibrc").write_text("backend: nosuch\n")
    drawn = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment(MPLBACKEND=backend), **PIPES, timeout=60)
    assert drawn.returncode == 0, drawn.stderr
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


def test_drawing_does_not_depend_on_settings_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    panel = Panel("epoch", "loss", {"test": [(1, 2.0), (2, 1.0)]})
    expected = svg(grid([panel]))
    for name, value in (("text.usetex", True), ("font.size", 20.0), ("axes.grid", True)):
        monkeypatch.setitem(rcParams, name, value)
    try:
        found = svg(grid([panel]))
    except (RuntimeError, OSError) as error:  # without LaTeX
        found = str(error)
    assert found == expected
