"""The report of a run: one HTML page made from the files in the run's folder."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from petra.analysis import html
from petra.analysis.plots import Panel, curve_panels, gradient_panels, svg, timeline_figure
from petra.analysis.timeline import read_trace
from petra.errors import DataError, first_line, invalid, require
from petra.training import read_rows
from petra.training.records import write_text_atomically

METRICS, UPDATES, REPORT = "metrics.jsonl", "updates.jsonl", "report.html"
Row = Mapping[str, Any]
LAYOUT = {
    "stage": "stage",
    "processes": "process",
    "blocks": "blocks",
    "parameters": "parameters",
    "flops": "FLOPs",
    "stores": "stores",
    "delay": "delay τ",
    "staleness": "staleness",
    "in_flight": "in flight",
}
"""Title of each column of the table of stages, by its key in summary.json."""
CURVES = {
    "gradient_norm": "norm of the gradient, mean over updates",
    "weight_drift": "drift of the weights from forward to backward, relative",
}
"""Label of each curve of the stages, by its key in metrics.jsonl."""
SECONDS = {"forward_seconds": "forward", "backward_seconds": "backward", "update_seconds": "update", "waiting_seconds": "waiting"}
SUFFIX = ".record.json"
"""How the name of a record ends: a finished run in one file, see reproduction/records/README.md."""


def history(folder: Path) -> list[dict[str, Any]]:
    """Return the rows of a run's metrics.jsonl, one for each epoch.

    Raises:
        ConfigError: If the folder is not a run's, or the run has not finished an epoch.
        DataError: If the file is damaged.
    """
    rows = _checked(folder / METRICS, ("epoch", "microbatches", "train_loss", "test_loss"))
    if not rows:
        raise invalid("runs", "folders of runs with a finished epoch", f"{folder}, where metrics.jsonl has none")
    return rows


def read_updates(folder: Path, clock: int | None = None) -> list[dict[str, Any]]:
    """Return the rows of a run's updates.jsonl, up to ``clock`` microbatches, or none if it has no such file.

    Raises:
        DataError: If the file is damaged.
    """
    return [row for row in _checked(folder / UPDATES, ("microbatches",)) if clock is None or row["microbatches"] <= clock]


def read_gradients(folder: Path) -> list[dict[str, Any]]:
    """Return the rows of a run's gradients.jsonl, or none if it has no such file.

    Raises:
        DataError: If the file is damaged.
    """
    return _checked(folder / "gradients.jsonl", ("microbatch", "stage", "reconstruction_error"))


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
    rows = history(folder)
    found = _summary(folder / "summary.json") if summary is None else summary
    path = folder / REPORT
    write_text_atomically(path, html.page(f"{folder.resolve().name}: report", _parts(folder, rows, found)))
    return path


def _parts(folder: Path, rows: Sequence[Row], summary: Row) -> Iterator[str]:
    yield html.heading(folder.resolve().name, _sentence(summary), level=1)
    yield html.tiles(_numbers(rows, summary))
    yield html.heading("Curves")
    yield html.diagrams([*curve_panels({"": rows}, {"": read_updates(folder)}), *_other_curves(rows)])
    yield from _stages(rows, summary)
    yield from _memory(rows, summary)
    if (folder / "trace.json").exists():
        intervals, processes = read_trace(folder / "trace.json")
        if intervals:
            text = "What each stage did in the recorded microbatches. Bars are labelled with the number of the microbatch."
            yield html.heading("Timeline", text)
            yield html.wide(svg(timeline_figure(intervals, "", "seconds", processes)))
    compared = read_gradients(folder)
    if compared:
        text = "The gradient of each stage in training, compared with three gradients of the same microbatch."
        yield html.heading("Gradient quality", f"{text} docs/diagnosis.md defines them.")
        yield html.diagrams(gradient_panels(compared), shaded=True)
    config = folder / "config.yaml"
    if config.exists():
        yield html.folded("Configuration", config.read_text(encoding="utf-8", errors="replace"))


def _sentence(summary: Row) -> str:
    if not summary:
        return "This run is not complete; the page shows what it has recorded so far."
    return (
        f"{summary['model']} with {summary['parameters']:,} parameters on {summary['data']}, by {summary['method']} "
        f"(d = {summary['delay']}, k = {summary['k']}): {summary['stages']} stages in {summary['processes']} process(es) on "
        f"{summary['device']}, transport {summary['transport']}, PyTorch {summary['torch']}."
    )


def _numbers(rows: Sequence[Row], summary: Row) -> Iterator[tuple[str, str]]:
    last = rows[-1]
    if "test_accuracy" in last:
        yield "test accuracy", f"{last['test_accuracy']:.2%}"
        yield "best test accuracy", f"{max(row.get('test_accuracy', 0.0) for row in rows):.2%}"
    if "test_perplexity" in last:
        yield "test perplexity", f"{last['test_perplexity']:.3f}"
    if "test_bits_per_byte" in last:
        yield "test bits per byte", f"{last['test_bits_per_byte']:.4f}"
    yield "test loss", f"{last['test_loss']:.4f}"
    yield "train loss", f"{last['train_loss']:.4f}"
    yield "epochs", f"{last['epoch']}"
    yield "microbatches", f"{last['microbatches']:,}"
    for unit in ("images", "tokens", "pixels"):
        speed = summary.get(f"{unit}_per_second", last.get(f"{unit}_per_second"))
        if speed is not None:
            yield f"{unit}/s", f"{speed:,.0f}"
    if summary:
        yield "peak memory, largest process", f"{max(summary['peak_memory_bytes']) / 1e6:,.0f} MB"
        yield "duration", _duration(summary["wall_seconds"])


def _other_curves(rows: Sequence[Row]) -> Iterator[Panel]:
    """Yield the learning rate and the speed by epoch."""
    for key, label in (
        ("learning_rate", "learning rate"),
        ("images_per_second", "images/s"),
        ("tokens_per_second", "tokens/s"),
    ):
        points = [(row["epoch"], row[key]) for row in rows if key in row]
        if points:
            yield Panel("epoch", label, {label: points})


def _stages(rows: Sequence[Row], summary: Row) -> Iterator[str]:
    layout: Sequence[Row] = summary.get("layout", ())
    names = _stage_numbers(rows)
    if not layout and not names:
        return
    yield html.heading(
        "Stages and staleness",
        "A stage's delay τ is the number of microbatches that it forwards between the forward and the backward pass of one "
        "microbatch; staleness is the mean number of updates between the two.",
    )
    if layout:
        yield html.table([*LAYOUT.values()], [[_cell(stage[key]) for key in LAYOUT] for stage in layout], ("blocks", "stores"))
        yield "<p></p>"
    found = []
    for key, label in CURVES.items():
        if curves := _by_epoch(rows, names, key):
            found.append(Panel("epoch", label, curves))
    for key, label in SECONDS.items():
        if times := _by_epoch(rows, names, key):
            found.append(Panel("epoch", f"seconds per epoch: {label}", times))
    if found:
        yield html.diagrams(found, shaded=True)


def _memory(rows: Sequence[Row], summary: Row) -> Iterator[str]:
    bars = {}
    if len(peaks := summary.get("peak_memory_bytes", ())) > 1:
        bars["process"] = "peak memory of the process, MB", list(enumerate(peaks))
    stored = {j: max(row.get(f"stage/{j}/buffer_bytes", 0) for row in rows) for j in _stage_numbers(rows)}
    if any(stored.values()):
        bars["stage"] = "inputs stored between forward and backward, MB", list(stored.items())
    if bars:
        yield html.heading("Memory")
        yield html.diagrams(
            Panel(xlabel, label, {label: [(x, value / 1e6) for x, value in points]}, bars=True)
            for xlabel, (label, points) in bars.items()
        )


def _stage_numbers(rows: Sequence[Row]) -> list[int]:
    return sorted({int(key.split("/")[1]) for key in rows[-1] if key.startswith("stage/")})


def _by_epoch(rows: Sequence[Row], stages: Sequence[int], key: str) -> dict[str, list[tuple[float, float]]]:
    lines = {f"stage {j}": [(row["epoch"], row[f"stage/{j}/{key}"]) for row in rows if f"stage/{j}/{key}" in row] for j in stages}
    return lines if any(lines.values()) else {}


def _cell(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return f"{value:,}" if isinstance(value, int) else f"{value:.3g}" if isinstance(value, float) else str(value)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"


def _summary(path: Path) -> dict[str, Any]:
    """Return the content of summary.json, or nothing if the run is not complete."""
    try:
        content = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: can't be read ({first_line(error)})") from error
    require(isinstance(content, dict), str(path), "a JSON object", type(content).__name__, DataError)
    return dict(content)


def _checked(path: Path, keys: Sequence[str]) -> list[dict[str, Any]]:
    """Return the rows of a file, all of which must have numbers under ``keys``."""
    rows = read_rows(path)
    for number, row in enumerate(rows, 1):
        for key in keys:
            expected = f"a number {key} in line {number}"
            require(isinstance(row.get(key), int | float), str(path), expected, row.get(key, "none"), DataError)
    return rows
