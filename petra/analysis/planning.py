"""Figure of a planned pipeline: its schedule, and how much of the time methods use the links and the devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from petra.analysis.plots import COLOURS
from petra.diagnostics.events import Interval


def draw_plan(intervals: Sequence[Interval], use: Mapping[str, tuple[float, float]], path: Path, title: str) -> None:
    """Draw the schedule of a method above, and below, as in a roofline, which limit each method is at.

    Args:
        intervals: Simulated intervals of the stages.
        use: For each method, the fractions of the period in which the busiest link transfers and the busiest device computes.
        path: File to write, in the format of its suffix.
        title: Title of the schedule.
    """
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    stages = 1 + max(i.stage for i in intervals)
    figure = Figure(figsize=(12, 3.5 + 0.3 * stages + 0.3 * len(use)), layout="constrained")
    above, below = figure.subplots(2, 1, height_ratios=[stages + 2, len(use) + 2])
    beside = {"loc": "upper left", "bbox_to_anchor": (1, 1)}
    start = min(i.start for i in intervals)
    shown = {kind: colour for kind, colour in COLOURS.items() if any(i.kind is kind for i in intervals)}
    for kind, colour in shown.items():
        for stage in range(stages):
            bars = [(i.start - start, i.stop - i.start) for i in intervals if i.kind is kind and i.stage == stage]
            above.broken_barh(bars, (stage - 0.4, 0.8), facecolor=colour, edgecolor="white", linewidth=0.4)
    above.set(xlabel="seconds", title=title, xlim=(0, max(i.stop for i in intervals) - start), ylim=(stages - 0.5, -0.5))
    above.set_yticks(range(stages), [f"stage {stage + 1}" for stage in range(stages)])
    above.legend(
        handles=[Patch(color=colour, label=str(kind)) for kind, colour in shown.items()], loc="upper left", ncols=len(shown)
    )
    for row, (link, device) in enumerate(use.values()):
        below.barh(row - 0.2, device, 0.38, color="#4c78a8", label="busiest device computes" if row == 0 else None)
        below.barh(row + 0.2, link, 0.38, color="#b279a2", label="busiest link transfers" if row == 0 else None)
    below.axvline(1, color="black", linewidth=0.8)
    below.set_yticks(range(len(use)), list(use))
    below.set(xlabel="fraction of the period; at 1, the method can't be faster", xlim=(0, 1.05), ylim=(len(use) - 0.4, -0.6))
    below.legend(**beside)
    figure.savefig(path, dpi=120)
