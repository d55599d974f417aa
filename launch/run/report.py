"""The report of a run: one HTML page made from the files in the run's folder."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from petra.analysis import html
from petra.analysis.plots import Panel, curve_panels, gradient_panels, svg, timeline_figure
from petra.analysis.timeline import read_trace
from petra.training.progress import value_text
from petra.training.records import write_text_atomically

from .folder import CONFIG, RunFolder

REPORT = "report.html"
SPEED, STORED = "_per_second", "buffer_bytes"
Row = Mapping[str, Any]
SUFFIX = ".record.json"
"""How the name of a record ends: a finished run in one file, see reproduction/records/README.md."""


def rows_of(columns: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Return the rows of a table in a record. A row lacks the columns in which it has no value."""
    found = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    return [{name: value for name, value in row.items() if value is not None} for row in found]


def write_report(folder: Path, summary: Row | None = None) -> Path:
    """Write ``report.html`` into a run's folder, with what the run has recorded so far, and return its path.

    Args:
        summary: Summary of the run. None: read summary.json if there is one.

    Raises:
        PetraError: If the folder is not a run's, the run has not finished an epoch, or a file is damaged or can't be written.
    """
    run, path = RunFolder(folder), folder / REPORT
    parts = _parts(run, run.rows(), run.summary() if summary is None else summary)
    write_text_atomically(path, html.page(f"{folder.resolve().name}: report", parts))
    return path


def _parts(run: RunFolder, rows: Sequence[Row], summary: Row) -> Iterator[str]:
    folder = run.path
    incomplete = "This run is not complete; the page shows what it has recorded so far."
    sentence = f"{describe(summary)}, on {summary['data']}, PyTorch {summary['torch']}." if summary else incomplete
    yield html.heading(folder.resolve().name, sentence, level=1)
    yield html.tiles(_numbers(rows, summary))
    yield html.heading("Curves")
    yield html.diagrams([*curve_panels({"": rows}, {"": run.updates()}), *_other_curves(rows)])
    yield from _stages(rows, summary)
    yield from _memory(rows, summary)
    if (folder / "trace.json").exists():
        intervals, processes = read_trace(folder / "trace.json")
        if intervals:
            text = "What each stage did in the recorded microbatches. Bars are labelled with the number of the microbatch."
            yield html.heading("Timeline", text)
            yield html.wide(svg(timeline_figure(intervals, "", "seconds", processes)))
    compared = run.gradients()
    if compared:
        text = "The gradient of each stage in training, compared with three gradients of the same microbatch."
        yield html.heading("Gradient quality", f"{text} docs/diagnosis.md defines them.")
        yield html.diagrams(gradient_panels(compared), shaded=True)
    config = folder / CONFIG
    if config.exists():
        yield html.folded("Configuration", config.read_text(encoding="utf-8", errors="replace"))


def describe(facts: Row) -> str:
    """Return what a run trains and how, from the facts of summary.json that are known at its start."""
    return (
        f"{facts['model']} with {facts['parameters']:,} parameters by {facts['method']} (d = {facts['delay']}, k = {facts['k']}): "
        f"{facts['stages']} stages in {facts['processes']} process(es) on {facts['device']}, transport {facts['transport']}"
    )


def _numbers(rows: Sequence[Row], summary: Row) -> Iterator[tuple[str, str]]:
    last = rows[-1]
    for key, value in last.items():
        if key.startswith("test_"):
            yield key.replace("_", " "), value_text(key.removeprefix("test_"), value)
    if "test_accuracy" in last:
        yield "best test accuracy", f"{max(row.get('test_accuracy', 0.0) for row in rows):.2%}"
    yield "train loss", f"{last['train_loss']:.4f}"
    yield "epochs", f"{last['epoch']}"
    yield "microbatches", f"{last['microbatches']:,}"
    for key, value in ({**last, **summary}).items():
        if key.endswith(SPEED):
            yield key.replace(SPEED, "/s"), f"{value:,.0f}"
    if summary:
        yield "peak memory, largest process", f"{max(summary['peak_memory_bytes']) / 1e6:,.0f} MB"
        yield "duration", _duration(summary["wall_seconds"])


def _other_curves(rows: Sequence[Row]) -> Iterator[Panel]:
    """Yield the learning rate and the speed by epoch."""
    for key in (key for key in rows[-1] if key == "learning_rate" or key.endswith(SPEED)):
        label = key.replace(SPEED, "/s").replace("_", " ")
        yield Panel("epoch", label, {label: [(row["epoch"], row[key]) for row in rows if key in row]})


def _stages(rows: Sequence[Row], summary: Row) -> Iterator[str]:
    layout: Sequence[Row] = summary.get("layout", ())
    found = [Panel("epoch", kind.replace("_", " "), curves) for kind, curves in _stage_curves(rows).items() if kind != STORED]
    if not layout and not found:
        return
    yield html.heading(
        "Stages and staleness",
        "A stage's delay τ is the number of microbatches that it forwards between the forward and the backward pass of one "
        "microbatch; staleness is the mean number of updates between the two. Norms are means over updates, seconds are sums.",
    )
    if layout:
        yield html.table([*layout[0]], [[*map(_cell, stage.values())] for stage in layout], ("blocks", "stores"))
        yield "<p></p>"
    if found:
        yield html.diagrams(found, shaded=True)


def _memory(rows: Sequence[Row], summary: Row) -> Iterator[str]:
    bars = {}
    if len(peaks := summary.get("peak_memory_bytes", ())) > 1:
        bars["process"] = "peak memory of the process, MB", list(enumerate(peaks))
    stored = {name: max(size for _, size in curve) for name, curve in _stage_curves(rows).get(STORED, {}).items()}
    if any(stored.values()):
        bars["stage"] = "inputs stored between forward and backward, MB", list(enumerate(stored.values(), 1))
    if bars:
        yield html.heading("Memory")
        yield html.diagrams(
            Panel(xlabel, label, {label: [(x, value / 1e6) for x, value in points]}, bars=True)
            for xlabel, (label, points) in bars.items()
        )


def _stage_curves(rows: Sequence[Row]) -> dict[str, dict[str, list[tuple[float, float]]]]:
    """Return the metrics of stages by epoch: by the name of the metric, then of the stage."""
    found: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for row in rows:
        for key, value in row.items():
            if key.startswith("stage/"):
                _, stage, kind = key.split("/")
                found.setdefault(kind, {}).setdefault(f"stage {stage}", []).append((row["epoch"], value))
    return found


def _cell(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return f"{value:,}" if isinstance(value, int) else f"{value:.3g}" if isinstance(value, float) else str(value)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"
