"""The report of a run: one HTML page made from the files in the run's folder."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import isfinite
from pathlib import Path
from typing import Any

from petra.analysis.plots import Panel, curve_panels, gradient_panels, grid, svg, timeline
from petra.analysis.timeline import read_trace
from petra.errors import DataError, first_line
from petra.training.progress import value_text
from petra.training.records import write_text_atomically

from ..config.schema import Config
from .folder import CONFIG, SUMMARY, best_accuracy, epochs_in, gradients_in, summary_in, updates_in

REPORT = "report.html"
SPEED = "_per_second"
PLANNED = ("staleness", "in_flight")
"""Quantities of stages that are known before a run."""
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
    trace, config = folder / "trace.json", folder / CONFIG
    rows, summary = epochs_in(folder), summary_in(folder) if summary is None else summary
    intervals, processes = read_trace(trace) if trace.exists() else ((), ())
    incomplete = "This run is not complete; the page shows what it has recorded so far."
    try:
        page = page_template(REPORT).render(
            name=folder.resolve().name,
            sentence=f"{describe(summary)}, on {summary['data']}, PyTorch {summary['torch']}." if summary else incomplete,
            rows=rows,
            summary=summary,
            value_text=value_text,
            best_accuracy=best_accuracy,
            timeline=svg(timeline(intervals, processes=processes)) if intervals else "",
            config=config.read_text(encoding="utf-8", errors="replace") if config.exists() else "",
            **{section: [_drawn(panel, section) for panel in own] for section, own in _panels(folder, rows, summary).items()},
        )
    except (LookupError, TypeError, ValueError) as error:
        raise DataError(f"{folder / SUMMARY}: expected the summary of a run, got another file ({first_line(error)})") from error
    write_text_atomically(folder / REPORT, page.lstrip())
    return folder / REPORT


def page_template(name: str) -> Any:
    """Return the template of a page, which is filled in by ``render``."""
    from jinja2 import Environment, FileSystemLoader

    folder = Path(__file__).parents[1] / "templates"
    return Environment(loader=FileSystemLoader(folder), autoescape=True, trim_blocks=True).get_template(name)


def describe(facts: Row) -> str:
    """Return what a run trains and how, from the facts of summary.json that are known at its start."""
    limit = facts.get("limit_batches")
    known = {
        "training loss": facts.get("trained"),
        "evaluation": facts.get("evaluated"),
        "epoch": limit and f"{limit} microbatches",
    }
    special = "".join(f"; {name}: {text}" for name, text in known.items() if text not in (None, "", "test"))
    return (
        f"{facts['model']} with {facts['parameters']:,} parameters by {facts['method']} (d = {facts['delay']}, k = {facts['k']}): "
        f"{facts['stages']} stages in {facts['processes']} process(es) on {facts['device']}, transport {facts['transport']}"
        f"{special}"
    )


def trained_text(config: Config) -> str:
    """Return how the training loss of a run is another function than the loss of its evaluation, or nothing."""
    smoothing, fraction = config.trainer.label_smoothing, config.trainer.bootstrap
    notes = [f"label smoothing {smoothing:g}"] * bool(smoothing) + [f"bootstrap {fraction}"] * (fraction is not None)
    return f"({', '.join(notes)})" if notes else ""


def evaluated_text(config: Config, batches: int, available: int) -> str:
    """Return what a run evaluates: the part of its data, the number of microbatches unless it is all, and averaged weights."""
    notes = [f"first {batches} of {available} microbatches"] * (batches < available)
    notes += ["moving average of the weights"] * (config.optim.rules.average is not None)
    return str(config.data.options.get("split") or "test") + (f" ({', '.join(notes)})" if notes else "")


def _panels(folder: Path, rows: Sequence[Row], summary: Row) -> dict[str, list[Panel]]:
    """Return the diagrams of each section of the page."""
    peaks, compared = summary.get("peak_memory_bytes", ()), gradients_in(folder)
    other = []
    for key in (key for key in rows[-1] if key == "learning_rate" or key.endswith(SPEED)):
        label = key.replace(SPEED, "/s").replace("_", " ")
        other.append(Panel("epoch", label, {label: [(row["epoch"], row[key]) for row in rows if key in row]}))
    peak = {"peak memory": [(process, size / 1e6) for process, size in enumerate(peaks)]}
    return {
        "curves": curve_panels({"": rows}, {"": updates_in(folder)}),
        "other": other if len(rows) > 1 else [],
        "stages": [*_stage_panels(rows)],
        "memory": [Panel("process", "peak memory of the process, MB", peak, bars=True)] if len(peaks) > 1 else [],
        "gradients": gradient_panels(compared) if compared else [],
    }


def _stage_panels(rows: Sequence[Row]) -> Iterator[Panel]:
    """Yield a diagram for each quantity of stages that was measured and isn't 0 throughout: against the epoch, or with one against
    the stage. Numbers of the plan are in the table of stages.
    """
    measured: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for row in rows:
        for key in (key for key in row if key.startswith("stage/")):
            _, stage, kind = key.split("/")
            measured.setdefault(kind, {}).setdefault(f"stage {stage}", []).append((row["epoch"], row[key]))
    for kind in (kind for kind in measured if kind not in PLANNED):
        lines, label = measured[kind], kind.replace("_", " ")
        if not any(value and isfinite(value) for points in lines.values() for _, value in points):
            continue
        if len(rows) > 1:
            yield Panel("epoch", label, lines)
        else:
            bars = [(int(stage.split()[1]), points[0][1]) for stage, points in lines.items()]
            yield Panel("stage", label, {label: bars}, bars=True)


def _drawn(panel: Panel, section: str) -> str:
    """Return a diagram as an SVG element."""
    lines = {name: [*points[:: -(-len(points) // MOST_POINTS) or 1]] for name, points in panel.lines.items()}
    return svg(grid([replace(panel, lines=lines)], columns=1, shaded=section in ("stages", "gradients") and not panel.bars))
