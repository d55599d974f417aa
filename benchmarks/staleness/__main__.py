"""Train the cells of the grid: ``python -m benchmarks.staleness TOKENS --out RUNS``.

TOKENS is a folder of token files with a training, a validation and a test part. Each run is written to a file of its own in RUNS.
Runs that are there are not repeated, so the command can be interrupted and repeated.
docs/evidence/staleness_protocol.md has the protocol.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.report import best_rate, cells_parser
from benchmarks.staleness.cells import CELLS, LARGE, MOST_COMPARED, Cell
from benchmarks.staleness.figures import final_runs, read_all
from benchmarks.staleness.train import LONG, SEARCH_SEED, SHORT, train_cell
from launch.runtime.terminal import command

RATES = (1e-3, 2e-3, 4e-3, 8e-3)
"""Peak learning rates of the search, which goes on beyond an edge while the best rate is there."""
SEEDS, MORE_SEEDS = (0, 1, 2), (3, 4)
"""Seeds of final runs, and more of them for the cells that are compared most."""


def trials(cell: Cell, data: Path, out: Path) -> list[dict[str, Any]]:
    """Return the records of a cell: those of the search, then the final ones. A large cell has the setting of the small one."""
    records = list[dict[str, Any]]()

    def train(rate: float, warmup: float, seed: int = SEARCH_SEED) -> float:
        records.append(train_cell(cell, rate, warmup, seed, data, out))
        return float(records[-1]["loss"]["val"])

    if cell in LARGE:
        small = final_runs(read_all(out)[replace(cell, model=cell.model.replace("_2m", "")).name])[0]
        train(small["rate"], small["warmup"], SEEDS[0])
        return records
    rate = best_rate(RATES, lambda rate: train(rate, SHORT))
    least = min(record["loss"]["val"] for record in records)
    warmup = LONG if train(rate, LONG) < least else SHORT
    for seed in SEEDS + (MORE_SEEDS if cell in MOST_COMPARED else ()):
        train(rate, warmup, seed)
    return records


@command
def main() -> None:
    """Train all cells in their order."""
    options = cells_parser(__doc__, (cell.name for cell in CELLS)).parse_args()
    for cell in CELLS:
        if cell.name in options.cells:
            trials(cell, options.tokens, options.out)


if __name__ == "__main__":
    main()
