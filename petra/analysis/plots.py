"""Figures of training runs. Drawing needs no display."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from io import StringIO
from math import isfinite
from pathlib import Path
from statistics import median
from typing import Any, Literal

from petra.diagnostics.events import Interval, Kind

COLOURS = {
    Kind.FORWARD: "#7fb0de",
    Kind.BACKWARD: "#f2a541",
    Kind.BACKWARD_WEIGHTS: "#e3cf57",
    Kind.UPDATE: "#6aa56a",
    Kind.LOSS: "#9d755d",
    Kind.SEND: "#b279a2",
    Kind.RECEIVE: "#d4a6c8",
    Kind.WAIT: "#e8e8e8",
}
PASSES = (Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_WEIGHTS)
"""Kinds whose bars have the number of their microbatch."""
DISTINCT = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#8c6d00", "#6a3d9a", "#e31a1c", "#1b7837", "#7f7f7f")
"""Colours of lines that have no order, which people with colour blindness can tell apart (the first six: Okabe and Ito 2008)."""
History = Sequence[Mapping[str, float]]
"""One row per epoch with ``epoch``, ``train_loss``, ``test_loss``, ``train_accuracy`` and ``test_accuracy`` (0 … 1)."""
TRAIN = {"linestyle": "--", "marker": "o", "markersize": 4, "markerfacecolor": "white"}
"""Style of training curves."""
FEW_EPOCHS = 5
"""Runs with fewer epochs show their training curve by updates if several runs share a figure."""
FAR = 2.0
"""Test losses above so many times the largest training loss lie beyond the axis."""
LEGEND_ROWS = 14
"""Entries of a legend, for each row of diagrams, before it gets another column."""
MOST_MARKERS = 60
"""Longer lines have no marker at each point."""
READABLE_BARS = 70
"""Number of bars of median length that the detail of a timeline shows side by side, so that their labels are readable."""


@contextmanager
def own_settings() -> Iterator[None]:
    """Draw with matplotlib's default settings, whatever the user's files and ``MPLBACKEND`` say (also a decorator).

    The variable may name a backend that only the kernel of a notebook has, which ends the import of matplotlib.
    """
    backend = os.environ.pop("MPLBACKEND", None)
    try:
        from matplotlib import style
    finally:
        if backend is not None:
            os.environ["MPLBACKEND"] = backend
    with style.context("default"):
        yield


@dataclass(frozen=True)
class Panel:
    """One diagram of a figure.

    Attributes:
        xlabel: Quantity of the x axis. Without one, the axis has no numbers.
        lines: Points (x, y) of each line by name.
        scale: Scale of the y axis; ``symlog`` is linear below 1e-6.
        powers: Use a logarithmic x axis with ticks at powers of two.
        bars: Draw bars from 0 instead of lines.
        styles: Properties of lines by name, which replace the default ones.
        dashed: Points of dashed lines, each in the colour of the line with the same name.
        top: Upper end of the y axis. Points above it are triangles at the edge, with their values.
    """

    xlabel: str
    ylabel: str
    lines: Mapping[str, Sequence[tuple[float, float]]]
    scale: Literal["linear", "log", "symlog"] = "linear"
    powers: bool = False
    bars: bool = False
    styles: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    dashed: Mapping[str, Sequence[tuple[float, float]]] = field(default_factory=dict)
    top: float | None = None


def curve_panels(runs: Mapping[str, History], updates: Mapping[str, History] | None = None) -> list[Panel]:
    """Return the diagrams of loss and accuracy (%) against the epoch, without those that no run records.

    Test curves are solid, training curves dashed. The axis of the loss ends above the largest training loss if test losses are
    far above it, as in the first epochs with batch norm, whose running statistics lag behind.

    Args:
        runs: History of each run by name.
        updates: Rows of :class:`petra.training.UpdateMeans` of runs by name. They are drawn as thin lines.
    """
    found = []
    for quantity, label, unit in (("loss", "cross entropy (nats)", 1.0), ("accuracy", "accuracy (%)", 100.0)):
        lines: dict[str, list[tuple[float, float]]] = {}
        styles: dict[str, dict[str, Any]] = {}
        for colour, (run, history) in zip(_line_colours(len(runs)), runs.items(), strict=True):
            train = colour if len(runs) > 1 else DISTINCT[1]
            for split, style in (("test", {"color": colour}), ("train", {"color": train, **TRAIN})):
                name, key = f"{run} {split}".strip(), f"{split}_{quantity}"
                lines[name] = [(row["epoch"], unit * row[key]) for row in history if key in row]
                styles[name] = style
            if len(runs) == 1 or len(history) < FEW_EPOCHS:
                name, key = f"{run} train, by updates".strip(), f"update/{quantity}"
                per_epoch = history[-1]["microbatches"] / history[-1]["epoch"]
                rows = [row for row in (updates or {}).get(run, ()) if key in row]
                lines[name] = [(row["microbatches"] / per_epoch, unit * row[key]) for row in rows]
                styles[name] = {"color": train, "linewidth": 0.8, "alpha": 0.7, "marker": ""}
        shown = {name: points for name, points in lines.items() if points}
        if shown:
            found.append(Panel("epoch", label, shown, styles=styles, top=_top(shown) if quantity == "loss" else None))
    return found


def _top(lines: Mapping[str, Sequence[tuple[float, float]]]) -> float | None:
    """Return the end of an axis that shows training losses and the test losses near them; None if all are."""
    found: dict[bool, list[float]] = {True: [], False: []}
    for name, points in lines.items():
        found[name.endswith("test")] += [y for _, y in points if isfinite(y)]
    test, train = found[True], found[False]
    if not train or max(test, default=0.0) <= FAR * max(train):
        return None
    return 1.05 * max([*train, *(y for y in test if y <= FAR * max(train))])


@own_settings()
def timeline(intervals: Sequence[Interval], title: str = "", unit: str = "seconds", processes: Sequence[Sequence[int]] = ()) -> Any:
    """Return a figure with one row per stage and its intervals. Forwards and backwards are labelled with their microbatch.

    If the bars of all intervals would be too short to read, a second diagram shows a part from the middle.

    Args:
        unit: Label of the time axis.
        processes: Stages of each process. Lines separate the processes.
    """
    from matplotlib.patches import Patch

    origin, stages = min(i.start for i in intervals), 1 + max(i.stage for i in intervals)
    intervals = [i._replace(start=i.start - origin, stop=i.stop - origin) for i in intervals]
    duration = max(i.stop for i in intervals)
    windows = [(0.0, duration), *_detail(intervals, duration)]
    figure = _figure(14, 0.9 + (0.5 + 0.32 * stages) * len(windows))
    for axes, (start, end) in zip(figure.subplots(len(windows), 1, squeeze=False).flat, windows, strict=True):
        _draw_intervals(axes, intervals, start, end)
        _mark_processes(axes, stages, processes)
    figure.axes[0].set_title(title)
    if len(windows) > 1:
        figure.axes[1].set_title("A part of it", loc="left", fontsize=10)
    figure.axes[-1].set_xlabel(unit)
    kinds = {i.kind for i in intervals}
    handles = [Patch(color=colour, label=kind) for kind, colour in COLOURS.items() if kind in kinds]
    figure.legend(handles=handles, loc="outside right upper", fontsize=8, frameon=False)
    return figure


def _detail(intervals: Sequence[Interval], duration: float) -> list[tuple[float, float]]:
    """Return the part of a long trace in which labels are readable: from the middle microbatch's backward in the last stage on."""
    bars = [i for i in intervals if i.kind in PASSES]
    if not bars or (length := READABLE_BARS * median(i.stop - i.start for i in bars)) > 0.7 * duration:
        return []
    middle = median(i.microbatch for i in bars)
    start = min(i.start for i in bars if i.kind is Kind.BACKWARD and i.microbatch >= middle)
    return [(min(start, duration - length), min(start, duration - length) + length)]


def _draw_intervals(axes: Any, intervals: Sequence[Interval], start: float, end: float) -> None:
    """Draw bars from ``start`` to ``end``, and labels where they fit."""
    shown, intervals = end - start, [i for i in intervals if i.stop > start and i.start < end]
    axes.set_xlim(start, end)
    for kind, colour in COLOURS.items():
        border = {"edgecolor": "white", "linewidth": 0.5} if kind in PASSES else {}
        for stage in sorted({i.stage for i in intervals if i.kind is kind}):
            bars = [(i.start, i.stop - i.start) for i in intervals if i.kind is kind and i.stage == stage]
            long = all(length > 0.004 * shown for _, length in bars)
            axes.broken_barh(bars, (stage - 0.4, 0.8), facecolor=colour, **(border if long else {}))
    for i in intervals:
        if i.kind in PASSES and i.stop - i.start > 0.008 * shown:
            middle = (i.start + i.stop) / 2
            axes.text(middle, i.stage, str(i.microbatch), ha="center", va="center", fontsize=7, clip_on=True, color="#111111")


def _mark_processes(axes: Any, stages: int, processes: Sequence[Sequence[int]]) -> None:
    """Label the rows, and separate the processes if there are several."""
    owners = {j: process for process, owned in enumerate(processes) for j in owned} if len(processes) > 1 else {}
    names = [f"stage {j + 1}" for j in range(stages)]
    for j in range(stages):
        if j in owners and owners.get(j - 1) != owners[j]:
            names[j] = f"process {owners[j]}   {names[j]}"
            if j:
                axes.axhline(j - 0.5, color="black", linewidth=0.8)
    axes.set_yticks(range(stages), names, fontsize=9)
    axes.set_ylim(stages - 0.5, -0.5)


@own_settings()
def grid(diagrams: Sequence[Panel], *, columns: int = 2, shaded: bool = False, title: str = "") -> Any:
    """Return a figure with diagrams in a grid, and one legend for all lines. Lines with the same name have the same colour.

    Args:
        columns: Number of diagrams in a row.
        shaded: Colour the lines like a rainbow, in their order.
        title: Title of the figure.
    """
    rows, names = -(-len(diagrams) // columns), list(dict.fromkeys(name for panel in diagrams for name in panel.lines))
    width, height, entry = 4.6 * columns, 3 * rows + 0.3 + 0.3 * bool(title), 0.6 + 0.075 * max(map(len, names), default=0)
    entries = len(names) if len(names) > 1 else 0
    if columns == 1:  # below, so that the lines are as wide as the screen of a phone
        where, stacks = "outside lower center", int(width / entry) or 1
        height += 0.18 * -(-entries // stacks)
    else:
        where, stacks = "outside right upper", -(-entries // (LEGEND_ROWS * rows))
        width += entry * stacks
    figure = _figure(width, height)
    colours = dict(zip(names, _line_colours(len(names), shaded=shaded), strict=True))
    for axes, panel in zip(figure.subplots(rows, columns, squeeze=False).flat, diagrams, strict=False):
        _draw(axes, panel, colours)
    for axes in figure.axes[len(diagrams) :]:
        axes.set_axis_off()
    handles = {label: handle for axes in figure.axes for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    if len(handles) > 1:
        figure.legend(handles.values(), handles.keys(), loc=where, ncols=stacks, fontsize=8, frameon=False)
    if title:
        figure.suptitle(title, fontsize=11)
    return figure


def _draw(axes: Any, panel: Panel, colours: Mapping[str, Any]) -> None:
    """Draw a diagram, with a colour for each line by name. Its title is the label of the y axis."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    for name, points in panel.lines.items():
        colour = colours[name]
        if panel.bars:
            axes.bar(*zip(*points, strict=True), color=colour, label=name)
            continue
        marker = "." if len(points) <= MOST_MARKERS else ""
        style = {"marker": marker, "markersize": 5, "linewidth": 1.4, "color": colour, "label": name, **panel.styles.get(name, {})}
        axes.plot([x for x, _ in points], [y for _, y in points], **style)
        if dashed := panel.dashed.get(name):
            axes.plot([x for x, _ in dashed], [y for _, y in dashed], "--", color=colour)
    axes.set_yscale(panel.scale, **({"linthresh": 1e-6} if panel.scale == "symlog" else {}))
    if panel.top is not None:
        _mark_beyond(axes, panel, panel.top, colours)
    if panel.powers:
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    elif panel.xlabel in ("epoch", "microbatch", "stage", "process"):
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    elif not panel.xlabel:
        axes.set_xticks([])
    axes.set_xlabel(panel.xlabel)
    axes.set_title(panel.ylabel, loc="left", fontsize=10)
    axes.grid(alpha=0.3)


def _mark_beyond(axes: Any, panel: Panel, top: float, colours: Mapping[str, Any]) -> None:
    """End the y axis at ``top``, and mark the points above it at the edge, with their values."""
    low = min(y for points in panel.lines.values() for _, y in points if isfinite(y))
    last = max(x for points in panel.lines.values() for x, _ in points)
    axes.set_ylim(low - 0.05 * (top - low), top)
    for name, points in panel.lines.items():
        for x, y in ((x, y) for x, y in points if y > top):
            colour = panel.styles.get(name, {}).get("color", colours[name])
            axes.plot([x], [top], "^", color=colour, markersize=6, clip_on=False)
            side: dict[str, Any] = {"xytext": (-4, -4), "ha": "right"} if x == last else {"xytext": (4, -4)}
            axes.annotate(f"{y:.3g}", (x, top), textcoords="offset points", fontsize=8, va="top", color=colour, **side)


def _line_colours(count: int, *, shaded: bool = False) -> list[Any]:
    """Return a colour for each of ``count`` lines: distinct ones, or if ``shaded`` or for many lines a rainbow in their order."""
    if not shaded and count <= len(DISTINCT):
        return list(DISTINCT[:count])
    from matplotlib import colormaps

    rainbow = colormaps["turbo"]
    return [tuple(0.9 * part for part in rainbow(0.1 + 0.82 * i / max(count - 1, 1))[:3]) for i in range(count)]


def by_stage(rows: Sequence[Mapping[str, float]], key: str) -> dict[str, list[tuple[float, float]]]:
    """Return one line per stage for :class:`Panel`: a quantity against the microbatch.

    Args:
        rows: Rows of :class:`petra.diagnostics.gradient_quality.GradientQuality`.
        key: Name of the quantity.
    """
    stages = sorted({int(row["stage"]) for row in rows})
    return {f"stage {j}": [(row["microbatch"], row[key]) for row in rows if row["stage"] == j and key in row] for j in stages}


def gradient_panels(rows: Sequence[Mapping[str, float]]) -> list[Panel]:
    """Return the diagrams of the rows of :class:`petra.diagnostics.gradient_quality.GradientQuality`, with a line per stage."""
    quantities = (
        ("cosine_end_to_end", "cosine to the end-to-end gradient"),
        ("norm_ratio_end_to_end", "norm relative to the end-to-end gradient"),
        ("cosine_delayed", "cosine to the delayed gradient"),
        ("norm_ratio_delayed", "norm relative to the delayed gradient"),
        ("reconstruction_error", "relative error of the reconstructed input"),
        ("angle_stored", "angle to the stored-activation gradient (degrees)"),
    )
    errors = ("reconstruction_error", "angle_stored")
    return [Panel("microbatch", label, by_stage(rows, key), "symlog" if key in errors else "linear") for key, label in quantities]


@own_settings()
def save(figure: Any, *files: Path | StringIO, **options: Any) -> None:
    """Write a figure in the format of the suffix of each path (PNG, SVG or PDF), and as SVG to files in memory.

    The same figure gives the same PNG and SVG. ``options`` are arguments of matplotlib's ``savefig``.
    """
    from matplotlib import rc_context

    for file in files:
        kind = file.suffix[1:] if isinstance(file, Path) else "svg"
        with rc_context({"svg.fonttype": "none", "svg.hashsalt": "petra"}):
            figure.savefig(file, format=kind, dpi=120, metadata={"Date": None} if kind == "svg" else None, **options)


def svg(figure: Any) -> str:
    """Return a figure as an SVG element without colours for text and axes, so that a page can choose them."""
    file = StringIO()
    save(figure, file, transparent=True)
    text = file.getvalue()
    return text[text.index("<svg") :].replace("#000000", "currentColor")


def _figure(width: float, height: float) -> Any:
    """Return a figure of the given size in inches that needs no display."""
    # Imported here because the import is slow and only one process draws.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure
