"""The report of a run: one HTML page made from the files in the run's folder."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from petra.analysis.plots import Panel, curve_panels, gradient_panels, panel_svg, svg, timeline_figure
from petra.analysis.timeline import read_trace
from petra.training.progress import value_text
from petra.training.records import write_text_atomically

from .folder import CONFIG, RunFolder

REPORT = "report.html"
TEMPLATE = Path(__file__).parents[1] / "templates" / REPORT
SPEED, STORED = "_per_second", "buffer_bytes"
MOST_POINTS = 400
"""Points of a line in a diagram. Of longer lines, every n-th point is drawn."""
Row = Mapping[str, Any]


def write_report(folder: Path, summary: Row | None = None) -> Path:
    """Write ``report.html`` into a run's folder, with what the run has recorded so far, and return its path.

    Args:
        summary: Summary of the run. None: read summary.json if there is one.

    Raises:
        PetraError: If the folder is not a run's, the run has not finished an epoch, or a file is damaged or can't be written.
    """
    from jinja2 import Template

    run, trace, config = RunFolder(folder), folder / "trace.json", folder / CONFIG
    rows, summary = run.rows(), run.summary() if summary is None else summary
    intervals, processes = read_trace(trace) if trace.exists() else ((), ())
    by_stage = _stage_curves(rows)
    incomplete = "This run is not complete; the page shows what it has recorded so far."
    page = Template(TEMPLATE.read_text(encoding="utf-8"), autoescape=True, trim_blocks=True).render(
        name=folder.resolve().name,
        sentence=f"{describe(summary)}, on {summary['data']}, PyTorch {summary['torch']}." if summary else incomplete,
        numbers=[*_numbers(rows, summary)],
        curves=_drawn([*curve_panels({"": rows}, {"": run.updates()}), *_other_curves(rows)]),
        layout=summary.get("layout", ()),
        text_columns=("blocks", "stores"),
        cell=_cell,
        stages=_drawn((Panel("epoch", k.replace("_", " "), v) for k, v in by_stage.items() if k != STORED), shaded=True),
        memory=_drawn(_memory(summary, by_stage.get(STORED, {}))),
        timeline=svg(timeline_figure(intervals, "", "seconds", processes)) if intervals else "",
        gradients=_drawn(gradient_panels(compared) if (compared := run.gradients()) else (), shaded=True),
        config=config.read_text(encoding="utf-8", errors="replace") if config.exists() else "",
    )
    write_text_atomically(folder / REPORT, page.lstrip())
    return folder / REPORT


def describe(facts: Row) -> str:
    """Return what a run trains and how, from the facts of summary.json that are known at its start."""
    return (
        f"{facts['model']} with {facts['parameters']:,} parameters by {facts['method']} (d = {facts['delay']}, k = {facts['k']}): "
        f"{facts['stages']} stages in {facts['processes']} process(es) on {facts['device']}, transport {facts['transport']}"
    )


def _drawn(panels: Iterable[Panel], *, shaded: bool = False) -> list[str]:
    """Return each diagram as an SVG element."""
    found = []
    for panel in panels:
        lines = {name: [*points[:: -(-len(points) // MOST_POINTS) or 1]] for name, points in panel.lines.items()}
        found.append(panel_svg(replace(panel, lines=lines), shaded=shaded))
    return found


def _numbers(rows: Sequence[Row], summary: Row) -> Iterator[tuple[str, str]]:
    last = rows[-1]
    for key in (key for key in last if key.startswith("test_")):
        yield key.replace("_", " "), value_text(key.removeprefix("test_"), last[key])
    if "test_accuracy" in last:
        yield "best test accuracy", f"{max(row.get('test_accuracy', 0.0) for row in rows):.2%}"
    yield from (("train loss", f"{last['train_loss']:.4f}"), ("epochs", f"{last['epoch']}"))
    yield "microbatches", f"{last['microbatches']:,}"
    for key, value in ({**last, **summary}).items():
        if key.endswith(SPEED):
            yield key.replace(SPEED, "/s"), f"{value:,.0f}"
    if summary:
        yield "peak memory, largest process", f"{max(summary['peak_memory_bytes']) / 1e6:,.0f} MB"
        yield "duration", str(timedelta(seconds=round(summary["wall_seconds"])))


def _other_curves(rows: Sequence[Row]) -> Iterator[Panel]:
    """Yield the learning rate and the speed by epoch."""
    for key in (key for key in rows[-1] if key == "learning_rate" or key.endswith(SPEED)):
        label = key.replace(SPEED, "/s").replace("_", " ")
        yield Panel("epoch", label, {label: [(row["epoch"], row[key]) for row in rows if key in row]})


def _memory(summary: Row, stored: Mapping[str, Sequence[tuple[float, float]]]) -> Iterator[Panel]:
    """Yield the peak memory of each process, if there are several, and the largest buffer of each stage."""
    peaks, sizes = summary.get("peak_memory_bytes", ()), [max(size for _, size in curve) for curve in stored.values()]
    for place, label, first, values, shown in (
        ("process", "peak memory of the process, MB", 0, peaks, len(peaks) > 1),
        ("stage", "inputs stored between forward and backward, MB", 1, sizes, any(sizes)),
    ):
        if shown:
            yield Panel(place, label, {label: [(i, size / 1e6) for i, size in enumerate(values, first)]}, bars=True)


def _stage_curves(rows: Sequence[Row]) -> dict[str, dict[str, list[tuple[float, float]]]]:
    """Return the metrics of stages by epoch: by the name of the metric, then of the stage."""
    found: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for row in rows:
        for key in (key for key in row if key.startswith("stage/")):
            _, stage, kind = key.split("/")
            found.setdefault(kind, {}).setdefault(f"stage {stage}", []).append((row["epoch"], row[key]))
    return found


def _cell(value: Any) -> str:
    """Return a value of summary.json as text."""
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return f"{value:,}" if isinstance(value, int) else f"{value:.3g}" if isinstance(value, float) else str(value)
