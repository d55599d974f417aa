"""Train the cells: ``python -m benchmarks.links TOKENS --out RUNS [--cells NAME ...] [--seeds SEED ...]``.

TOKENS and RUNS are as for ``benchmarks.staleness``, whose runs of full streams count too. A cell is first trained with several
learning rates, each with the seed of the search, and then with the best one and the seeds. Runs that are there are not repeated.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.links.cells import CELLS, LinkCell
from benchmarks.report import best_rate, cells_parser
from benchmarks.staleness.train import SEARCH_SEED, SHORT, train_cell
from launch.runtime.terminal import command

RATES = (8e-3, 16e-3)
"""Peak learning rates with which the search begins."""
SEEDS = (0, 1, 2, 3, 4)


def trials(cell: LinkCell, data: Path, out: Path, seeds: list[int], rate: float | None) -> list[dict[str, Any]]:
    """Return the records of a cell: those of the search, unless there is a rate, then the final ones."""
    records = list[dict[str, Any]]()

    def train(rate: float, seed: int = SEARCH_SEED) -> float:
        records.append(train_cell(cell, rate, SHORT, seed, data, out))
        return float(records[-1]["loss"]["val"])

    rate = rate or best_rate(RATES, train)
    for seed in seeds:
        train(rate, seed)
    return records


@command
def main() -> None:
    """Train the cells in their order."""
    parser = cells_parser(__doc__, (cell.name for cell in CELLS))
    parser.add_argument("--seeds", type=int, nargs="*", default=[*SEEDS], help="seeds of the final runs")
    parser.add_argument("--rate", type=float, help="learning rate of the final runs; by default, the best of a search")
    options = parser.parse_args()
    for cell in CELLS:
        if cell.name in options.cells:
            trials(cell, options.tokens, options.out, options.seeds, options.rate)


if __name__ == "__main__":
    main()
