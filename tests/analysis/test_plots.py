"""Figures: what they show, that nothing covers it, and that parts of pages are well-formed."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.text import Text
from PIL import Image

from petra.analysis import html
from petra.analysis.plots import Panel, curve_panels, curves, draw, line_colours, panel_svg, panels, svg, timeline_figure
from petra.analysis.timeline import read_trace, write_trace
from petra.diagnostics.events import Interval, Kind
from petra.errors import DataError

EPOCHS = [
    {
        "epoch": e,
        "microbatches": 10 * e,
        "train_loss": 2 / e,
        "test_loss": 3 / e,
        "train_accuracy": 0.1 * e,
        "test_accuracy": 0.05 * e,
    }
    for e in range(1, 7)
]
UPDATES = [{"microbatches": m, "updates": m // 2, "update/loss": 3 / m, "update/accuracy": m / 100} for m in range(2, 61, 2)]


def schedule(stages: int, microbatches: int) -> list[Interval]:
    """Return bars of length 1 and 2, one after the other."""
    found, clock = [], 0.0
    for m in range(microbatches):
        for stage in range(stages):
            found += [Interval(stage, Kind.FORWARD, m, clock, clock + 1), Interval(stage, Kind.BACKWARD, m, clock + 1, clock + 3)]
            clock += 3
    return found


def test_a_run_of_one_epoch_has_a_curve() -> None:
    loss, accuracy = curve_panels({"": EPOCHS[:1]}, {"": UPDATES[:5]})
    assert loss.lines["train, by updates"] == [(m / 10, 3 / m) for m in range(2, 11, 2)]
    assert accuracy.lines["train, by updates"][-1] == (1.0, 10.0)
    assert accuracy.lines["test"] == [(1, 5.0)]
    assert loss.styles["test"]["color"] != loss.styles["train"]["color"], "two points of one colour can't be told apart"


def test_several_long_runs_show_no_updates_and_runs_need_no_accuracy() -> None:
    named = curve_panels({"a": EPOCHS, "b": EPOCHS}, {"a": UPDATES, "b": UPDATES})
    assert [*named[0].lines] == ["a test", "a train", "b test", "b train"]
    without = [{key: value for key, value in row.items() if "accuracy" not in key} for row in EPOCHS]
    assert [panel.ylabel for panel in curve_panels({"": without}, {})] == ["cross entropy (nats)"]


@pytest.mark.parametrize("count", [2, 10, 18])
def test_the_lines_of_a_figure_have_colours_of_their_own(count: int) -> None:
    for shaded in (False, True):
        assert len({str(colour) for colour in line_colours(count, shaded=shaded)}) == count


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """Figures that are saved."""
    figures: list[Figure] = []
    save = Figure.savefig

    def kept(figure: Figure, *arguments: object, **options: object) -> None:
        figures.append(figure)
        save(figure, *arguments, **options)

    monkeypatch.setattr(Figure, "savefig", kept)
    return figures


def test_diagrams_with_other_lines_share_the_colours_of_the_legend(tmp_path: Path, drawn: list[Figure]) -> None:
    points = [(1.0, 2.0), (3.0, 4.0)]
    diagrams = [Panel("x", "y", dict.fromkeys(names, points)) for names in (["a", "b", "c"], ["c", "d", "b"])]
    panels(diagrams, tmp_path / "shared.png")
    found = [(line.get_label(), line.get_color()) for axes in drawn[0].axes for line in axes.get_lines()]
    assert len(found) == 6
    assert len(set(found)) == 4
    legend = {text.get_text(): handle.get_color() for text, handle in zip(*_legend(drawn[0]), strict=True)}
    assert legend == dict(found)


def _legend(figure: Figure) -> tuple[list[Text], list[Line2D]]:
    (legend,) = figure.legends
    return legend.get_texts(), legend.get_lines()


def test_legends_cover_no_diagram(tmp_path: Path, drawn: list[Figure]) -> None:
    curves({f"a run with a long name {i}": EPOCHS for i in range(5)}, tmp_path / "five.png", "five")
    panels([Panel("x", "y", {f"stage {i}": [(1, 2), (3, 4)] for i in range(18)})] * 3, tmp_path / "stages.png", shaded=True)
    for figure in drawn:
        figure.canvas.draw()
        (legend,) = figure.legends
        box = legend.get_window_extent()
        for axes in figure.axes:
            assert axes.get_legend() is None
            assert not axes.axison or not box.overlaps(axes.get_window_extent())
    assert Image.open(tmp_path / "five.png").width > 1000


def test_axes_have_plain_numbers() -> None:
    axes = Figure().subplots()
    draw(axes, Panel("seconds", "accuracy", {"a": [(4, 10), (300, 90)]}, powers=True), {"a": "black"})
    axes.figure.canvas.draw()
    assert {"4", "16", "64", "256"} <= {label.get_text() for label in axes.get_xticklabels()}


def test_a_long_timeline_shows_a_readable_part_and_its_processes() -> None:
    whole, detail = timeline_figure(schedule(10, 24), "", "seconds", [range(5), range(5, 10)]).axes
    assert not any(text.get_text().isdigit() for text in whole.texts), "bars are too short for labels"
    numbers = [text for text in detail.texts if text.get_text().isdigit()]
    assert len(numbers) > 20
    assert detail.get_xlim()[0] > 200, "from the middle of the run, when the pipeline is full"
    for axes in (whole, detail):
        assert [label.get_text() for label in axes.get_yticklabels()][4:6] == ["stage 5", "process 1   stage 6"]
        assert len(axes.lines) == 1
    (short,) = timeline_figure(schedule(3, 4), "", "units", [range(3)]).axes
    assert [label.get_text() for label in short.get_yticklabels()] == ["stage 1", "stage 2", "stage 3"]
    assert not short.lines


def test_a_trace_is_read_back(tmp_path: Path) -> None:
    intervals = schedule(4, 3)
    write_trace(intervals, tmp_path / "trace.json", [range(1), range(1, 4)])
    found, processes = read_trace(tmp_path / "trace.json")
    assert processes == [[0], [1, 2, 3]]
    assert [(i.stage, i.kind, i.microbatch) for i in found] == [(i.stage, i.kind, i.microbatch) for i in intervals]
    assert [i.stop for i in found] == pytest.approx([i.stop for i in intervals])
    (tmp_path / "trace.json").write_text('{"traceEvents": [{"ph": "X"}]}')
    with pytest.raises(DataError, match=r"trace.json: can't be read as a trace \(KeyError"):
        read_trace(tmp_path / "trace.json")


def test_pictures_of_a_page_take_its_colours_and_need_nothing_else() -> None:
    for text in (
        panel_svg(Panel("epoch", "loss < 1 & more", {"test": [(1, 2.0), (2, 1.0)]})),
        svg(timeline_figure(schedule(10, 24), "", "seconds", [])),
    ):
        ElementTree.fromstring(text)
        assert "#000000" not in text
        assert "currentColor" in text
        assert not re.search(r'(?:href|src)="(?!#)', text)


def test_parts_of_a_page_are_escaped_and_thinned() -> None:
    assert "&lt;b&gt;" in html.table(["name"], [["<b>"]])
    assert "&lt;/pre&gt;" in html.folded("a", "</pre>")
    text = html.diagrams([Panel("x", "y", {"a": [(i, i) for i in range(10_000)]})])
    assert len(text) < 40_000
