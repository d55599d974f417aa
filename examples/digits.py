"""PETRA against backpropagation on images of handwritten digits: ``python examples/digits.py`` draws runs/digits.png."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from petra import METHODS, Method, Pipeline, Recipe, TensorSpec
from petra.analysis.plots import curve_panels, grid, save
from petra.data import EvalSource, TrainSource, load_dataset
from petra.models import revnet18
from petra.training import MultiStep, sgd

PETRA = METHODS["petra"]
COMPARED = {
    "backprop": METHODS["backprop"],  # exact gradients; the stages take turns
    "petra": PETRA,  # all stages work at the same time; gradients are stale
    "petra, d = 1": replace(PETRA, delay=1),  # the same with half the staleness
}


def train(method: Method, epochs: int, microbatches: int | None = None) -> list[dict[str, float]]:
    """Train RevNet-18 at a quarter of its width, in 10 stages.

    Args:
        method: Method of the training run.
        epochs: Number of epochs.
        microbatches: Microbatches per epoch; None for all.

    Returns:
        Loss and accuracy of each epoch.
    """
    torch.set_num_threads(1)
    digits = load_dataset("digits")
    data, test = TrainSource(digits, batch_size=64, seed=0), EvalSource(digits, batch_size=64)
    count = microbatches or data.batches_per_epoch
    rate = MultiStep(0.1, count, epochs, warmup_epochs=1, milestones=[max(1, epochs - 1)])
    inputs = TensorSpec((64, 3, 32, 32), torch.float32)
    pipeline = Pipeline(revnet18(width=0.25), inputs, Recipe(sgd, rate), method=method, k=2)
    rows = []
    for epoch in range(1, epochs + 1):
        results = {"train": pipeline.train(data, count), "test": pipeline.evaluate(test, test.batches)}
        row: dict[str, float] = {"epoch": epoch, "microbatches": pipeline.microbatches_done}
        for split, result in results.items():
            row |= {f"{split}_loss": result.loss, f"{split}_accuracy": result.metrics["accuracy"]}
        rows.append(row)
    return rows


def main(
    epochs: int = 4, microbatches: int | None = None, picture: Path = Path("runs/digits.png")
) -> dict[str, list[dict[str, float]]]:
    """Train with each method, print the test accuracies, and draw all curves."""
    histories = {}
    for name, method in COMPARED.items():
        histories[name] = train(method, epochs, microbatches)
        print(f"{name:13} test accuracy {histories[name][-1]['test_accuracy']:.1%}")
    picture.parent.mkdir(parents=True, exist_ok=True)
    save(grid(curve_panels(histories), title="RevNet-18 at a quarter of its width, on digits"), picture)
    print(f"curves in {picture}")
    return histories


if __name__ == "__main__":
    main()
