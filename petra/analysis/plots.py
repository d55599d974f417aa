"""Plots, drawn without a display."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path


def curves(history: Sequence[Mapping[str, float]], path: Path, title: str) -> None:
    """Draws loss and accuracy (%) of training and test data against the epoch into a PNG file.

    Args:
        history: for each epoch ``epoch``, ``train_loss``, ``test_loss``, ``train_accuracy`` and ``test_accuracy`` (0 … 1).
    """
    # Imported here, because it takes as long as everything else together and only one process draws.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    epochs = [row["epoch"] for row in history]
    for axes, (name, label, unit) in zip(
        figure.subplots(1, 2), (("loss", "cross entropy (nats)", 1), ("accuracy", "accuracy (%)", 100)), strict=True
    ):
        for split in ("train", "test"):
            axes.plot(epochs, [unit * row[f"{split}_{name}"] for row in history], marker=".", label=split)
        axes.set(xlabel="epoch", ylabel=label)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(alpha=0.3)
        axes.legend()
    figure.suptitle(title)
    figure.savefig(path, dpi=120)
