"""Compare runs: print a table of their results, and draw their curves into one figure.

``petra compare runs/a runs/b --out compare.png``
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from omegaconf import OmegaConf

from petra.analysis.plots import curves
from petra.errors import PetraError

from .run.folder import history
from .run.markdown import table

HEADER = ("run", "method", "d", "k", "epochs", "train loss", "test loss", "test accuracy", "best")


def main(arguments: list[str] | None = None) -> None:
    """Print a Markdown table of the runs, finished or not, and draw their curves."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, help="folders of runs")
    parser.add_argument("--out", type=Path, help="PNG file for the curves")
    options = parser.parse_args(arguments)
    try:
        histories = {folder.name: history(folder) for folder in options.runs}
    except PetraError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    cells = []
    for folder, rows in zip(options.runs, histories.values(), strict=True):
        config, last = OmegaConf.load(folder / "config.yaml"), rows[-1]
        values = (
            folder.name,
            config.method.name,
            config.method.delay,
            config.k,
            f"{last['epoch']} of {config.trainer.epochs}",
            f"{last['train_loss']:.4f}",
            f"{last['test_loss']:.4f}",
            f"{last['test_accuracy']:.2%}",
            f"{max(row['test_accuracy'] for row in rows):.2%}",
        )
        cells.append([str(value) for value in values])
    print(table(HEADER, cells), end="")
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        curves(histories, options.out, "")


if __name__ == "__main__":
    main()
