"""Plots, drawn without a display."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

History = Sequence[Mapping[str, float]]
"""For each epoch ``epoch``, ``train_loss``, ``test_loss``, ``train_accuracy`` and ``test_accuracy`` (0 … 1)."""


def curves(runs: Mapping[str, History], path: Path, title: str) -> None:
    """Draws loss and accuracy (%) of one or several runs against the epoch into a PNG file: test solid, training dashed."""
    # Imported here, because it takes as long as everything else together and only one process draws.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
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
