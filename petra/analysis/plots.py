"""Figures of training runs. Drawing needs no display."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from petra.diagnostics.events import Interval, Kind

COLOURS = {
    Kind.FORWARD: "#4c78a8",
    Kind.BACKWARD: "#f2a541",
    Kind.UPDATE: "#6aa56a",
    Kind.LOSS: "#9d755d",
    Kind.SEND: "#b279a2",
    Kind.RECEIVE: "#d4a6c8",
    Kind.WAIT: "#e8e8e8",
}
History = Sequence[Mapping[str, float]]
"""One row per epoch with ``epoch``, ``train_loss``, ``test_loss``, ``train_accuracy`` and ``test_accuracy`` (0 … 1)."""


def curves(runs: Mapping[str, History], path: Path, title: str) -> None:
    """Plot loss and accuracy (%) of one or several runs against the epoch. Test curves are solid, training curves dashed.

    Args:
        runs: History of each run by name.
        path: PNG file to write.
    """
    from matplotlib.ticker import MaxNLocator

    figure = _figure(9, 3.6)
    quantities = (("loss", "cross entropy (nats)", 1), ("accuracy", "accuracy (%)", 100))
    for axes, (quantity, label, unit) in zip(figure.subplots(1, 2), quantities, strict=True):
        for colour, (name, history) in enumerate(runs.items()):
            for split, line in (("test", "-"), ("train", "--")):
                axes.plot(
                    [row["epoch"] for row in history],
                    [unit * row[f"{split}_{quantity}"] for row in history],
                    line,
                    color=f"C{colour}",
                    marker=".",
                    label=" ".join(filter(None, (name, split))),
                )
        axes.set(xlabel="epoch", ylabel=label)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(alpha=0.3)
    axes.legend()
    figure.suptitle(title)
    figure.savefig(path, dpi=120)


def timeline(intervals: Sequence[Interval], paths: Sequence[Path], title: str, unit: str = "seconds") -> None:
    """Draw one row per stage with its intervals. Forwards and backwards are labelled with their microbatch.

    Files are reproducible: the same intervals give the same bytes.

    Args:
        paths: Files to write, in the format of their suffix (PNG, SVG or PDF).
        unit: Label of the time axis.
    """
    from matplotlib import rc_context
    from matplotlib.patches import Patch

    stages = 1 + max(i.stage for i in intervals)
    start, stop = min(i.start for i in intervals), max(i.stop for i in intervals)
    figure = _figure(14, 1.2 + 0.45 * stages)
    axes = figure.subplots()
    for kind, colour in COLOURS.items():
        for stage in range(stages):
            bars = [(i.start - start, i.stop - i.start) for i in intervals if i.kind is kind and i.stage == stage]
            border = {"edgecolor": "white", "linewidth": 0.5} if kind in (Kind.FORWARD, Kind.BACKWARD) else {}
            axes.broken_barh(bars, (stage - 0.4, 0.8), facecolor=colour, **border)
    for i in intervals:
        if i.kind in (Kind.FORWARD, Kind.BACKWARD) and i.stop - i.start > 0.008 * (stop - start):
            middle = (i.start + i.stop) / 2 - start
            axes.text(middle, i.stage, str(i.microbatch), ha="center", va="center", fontsize=7, clip_on=True)
    axes.set(xlabel=unit, xlim=(0, stop - start), ylim=(stages - 0.5, -0.5), title=title)
    axes.set_yticks(range(stages), [f"stage {j + 1}" for j in range(stages)])
    shown = [kind for kind in COLOURS if any(i.kind is kind for i in intervals)]
    patches = [Patch(color=COLOURS[kind], label=kind) for kind in shown]
    figure.legend(handles=patches, loc="outside right upper", fontsize=8)
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "petra"}):
        for path in paths:
            figure.savefig(path, dpi=120, metadata={"Date": None} if path.suffix == ".svg" else None)


@dataclass(frozen=True)
class Panel:
    """One diagram of a figure.

    Attributes:
        lines: Points (x, y) of each line by name.
        scale: Scale of the y axis; ``symlog`` is linear below 1e-6.
        powers: Use a logarithmic x axis with powers of two.
        dashed: Points of dashed lines, each in the colour of the line with the same name.
    """

    xlabel: str
    ylabel: str
    lines: Mapping[str, Sequence[tuple[float, float]]]
    scale: Literal["linear", "log", "symlog"] = "linear"
    powers: bool = False
    dashed: Mapping[str, Sequence[tuple[float, float]]] = field(default_factory=dict)


def panels(diagrams: Sequence[Panel], path: Path, *, columns: int = 2, shaded: bool = False) -> None:
    """Draw diagrams in a grid, with one legend in the last of them.

    Args:
        path: PNG file to write.
        columns: Number of diagrams in a row.
        shaded: Colour the lines from blue to red, in their order.
    """
    rows = -(-len(diagrams) // columns)
    figure = _figure(6 * columns, 3 * rows + 0.6)
    for axes, panel in zip(figure.subplots(rows, columns, squeeze=False).flat, diagrams, strict=False):
        for i, (name, points) in enumerate(panel.lines.items()):
            shade = i / max(len(panel.lines) - 1, 1)
            colour = (shade, 0.3, 1 - shade) if shaded else f"C{i}"
            axes.plot([x for x, _ in points], [y for _, y in points], marker=".", color=colour, label=name)
            if dashed := panel.dashed.get(name):
                axes.plot([x for x, _ in dashed], [y for _, y in dashed], "--", color=colour)
        if panel.scale == "symlog":
            axes.set_yscale("symlog", linthresh=1e-6)
        else:
            axes.set_yscale(panel.scale)
        if panel.powers:
            axes.set_xscale("log", base=2)
        axes.set(xlabel=panel.xlabel, ylabel=panel.ylabel)
        axes.grid(alpha=0.3)
    figure.axes[len(diagrams) - 1].legend(fontsize=7, ncols=2 if shaded else 1)
    for axes in figure.axes[len(diagrams) :]:
        axes.set_axis_off()
    figure.savefig(path, dpi=120)


def by_stage(rows: Sequence[Mapping[str, float]], key: str) -> dict[str, list[tuple[float, float]]]:
    """Return one line per stage for :class:`Panel`: a quantity against the microbatch.

    Args:
        rows: Rows of :class:`petra.diagnostics.gradient_quality.GradientQuality`.
        key: Name of the quantity.
    """
    stages = sorted({int(row["stage"]) for row in rows})
    return {f"stage {j}": [(row["microbatch"], row[key]) for row in rows if row["stage"] == j and key in row] for j in stages}


def gradient_quality(rows: Sequence[Mapping[str, float]], path: Path) -> None:
    """Plot the rows of :class:`petra.diagnostics.gradient_quality.GradientQuality` with one line per stage into a PNG file."""
    quantities = (
        ("cosine_end_to_end", "cosine to the end-to-end gradient"),
        ("norm_ratio_end_to_end", "norm relative to the end-to-end gradient"),
        ("cosine_delayed", "cosine to the delayed gradient"),
        ("norm_ratio_delayed", "norm relative to the delayed gradient"),
        ("reconstruction_error", "relative error of the reconstructed input"),
        ("angle_stored", "angle to the stored-activation gradient (degrees)"),
    )
    errors = ("reconstruction_error", "angle_stored")
    diagrams = [
        Panel("microbatch", label, by_stage(rows, key), "symlog" if key in errors else "linear") for key, label in quantities
    ]
    panels(diagrams, path, shaded=True)


def _figure(width: float, height: float) -> Any:
    """Return a figure of the given size in inches that needs no display."""
    # Imported here because the import is slow and only one process draws.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure
