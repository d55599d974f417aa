"""Where weight prediction acts: ``python -m benchmarks.staleness.cosines TOKENS --out FILE``.

Trains PETRA with Muon at a staleness of 7.5 without a remedy, with weight prediction and with a fitted gain, each at the rate that
its search chose, and compares the gradients of each stage with those of backpropagation through the whole network at the current
weights (:class:`petra.diagnostics.gradient_quality.GradientQuality`). Prints the mean cosine over the second half of the run.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

from benchmarks.report import machine
from benchmarks.staleness.cells import Cell
from benchmarks.staleness.train import SHORT, UPDATES, Trial, train
from petra import Hook, Pipeline
from petra.diagnostics.gradient_quality import GradientQuality
from petra.training import write_json

CELLS = {name: Cell("petra", 4, "muon", name) for name in ("none", "prediction", "fitted")}
"""Cells by remedy."""
RATE, EVERY = 8e-3, 64
"""Peak learning rate, and microbatches between two comparisons."""


def cosines(cell: Cell, data: Path) -> dict[str, list[float]]:
    """Return the mean cosine of each stage, and the last gain of each stage with a fitted one."""
    rows, seen = list[dict[str, float]](), list[Pipeline]()

    def observe(pipeline: Pipeline) -> Hook:
        seen.append(pipeline)
        return GradientQuality(pipeline, EVERY, rows.append)

    train(Trial(cell, RATE, SHORT, UPDATES, seed=0), data, observe)
    half, stages = UPDATES * cell.k // 2, range(1, cell.stages + 1)
    late = {j: [row["cosine_end_to_end"] for row in rows if row["stage"] == j and row["microbatch"] >= half] for j in stages}
    parts = [part for worker in seen[0].workers.values() for part in worker.update.parts]
    gains = [round(part.gain, 3) for part in parts if hasattr(part, "gain")]
    return {"cosine": [round(statistics.fmean(late[j]), 4) for j in stages], "gain": gains}


def main() -> None:
    """Train, write the figures and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tokens", type=Path, help="folder of the token files")
    parser.add_argument("--out", type=Path, required=True, help="JSON file")
    options = parser.parse_args()
    found = {name: cosines(cell, options.tokens) for name, cell in CELLS.items()}
    write_json(options.out, {"cells": found, "rate": RATE, "machine": machine()})
    print(f"| stage | {' | '.join(found)} | gain |\n|---|{'---|' * (len(found) + 1)}")
    gains = [*(f"{gain:.2f}" for gain in found["fitted"]["gain"]), ""]
    for j, row in enumerate(zip(*(each["cosine"] for each in found.values()), strict=True)):
        print(f"| {j + 1} | {' | '.join(f'{value:.3f}' for value in row)} | {gains[j]} |")


if __name__ == "__main__":
    main()
