"""Train the cells of the grid: ``python -m benchmarks.staleness TOKENS --out RUNS``.

TOKENS is a folder of token files with a training, a validation and a test part. Each run is written to a file of its own in RUNS.
Runs that are there are not repeated, so the command can be interrupted and repeated. README.md of this folder has the protocol.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.staleness.cells import GRID, IDEA, MOST_COMPARED, Cell
from benchmarks.staleness.train import Trial, run

UPDATES = 256
"""Updates of each run: 524,288 tokens. Shorter runs of a search would favour larger rates than the final runs need."""
RATES = (1e-3, 2e-3, 4e-3, 8e-3)
"""Peak learning rates of the search, which goes on beyond an edge while the best rate is there."""
MOST_RATES = 8
SHORT, LONG = 0.1, 0.3
"""Warm-ups, as fractions of a run."""
SEARCH_SEED = 100
SEEDS, MORE_SEEDS = (0, 1, 2), (3, 4)
"""Seeds of final runs, which the search does not use, and more of them for the cells that are compared most."""


def trials(cell: Cell, data: Path, out: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of a cell: those of the search, then the final ones."""
    found: dict[float, dict[str, Any]] = {}

    def loss(rate: float) -> float:
        return float(found[rate]["loss"]["val"])

    wanted = list(RATES)
    while wanted:
        for rate in wanted:
            found[rate] = run(Trial(cell, rate, SHORT, UPDATES, SEARCH_SEED), data, out)
            yield found[rate]
        best = min(found, key=loss)
        beyond = {min(found): min(found) / 2, max(found): max(found) * 2}
        wanted = [beyond[best]] if best in beyond and len(found) < MOST_RATES else []
    longer = run(Trial(cell, best, LONG, UPDATES, SEARCH_SEED), data, out)
    yield longer
    rate, warmup = best, LONG if longer["loss"]["val"] < loss(best) else SHORT
    for seed in SEEDS + (MORE_SEEDS if cell in MOST_COMPARED else ()):
        yield run(Trial(cell, rate, warmup, UPDATES, seed, final=True), data, out)


def main() -> None:
    """Train all cells in their order."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tokens", type=Path, help="folder of the token files")
    parser.add_argument("--out", type=Path, required=True, help="folder of the records")
    parser.add_argument("--cells", nargs="*", help="names of cells; all by default")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    for number, cell in enumerate((*GRID, *IDEA), 1):
        if options.cells and cell.name not in options.cells:
            continue
        for record in trials(cell, options.tokens, options.out):
            print(
                f"{number}/{len(GRID) + len(IDEA)} {cell.name}: rate {record['rate']:g}, warm-up {record['warmup']:g}, "
                f"{record['updates']} updates, seed {record['seed']}: {record['bits_per_byte']}, {record['seconds']} s",
                flush=True,
            )


if __name__ == "__main__":
    main()
