"""Compare runs: print a table of their results, and draw their curves into one figure.

``python -m launch.compare runs/a runs/b --out compare.png``
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from launch.run.markdown import table
from petra.analysis.plots import curves
from petra.errors import PetraError, invalid

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


def history(folder: Path) -> list[dict[str, Any]]:
    """Return the rows of a run's metrics.jsonl, one for each epoch.

    Raises:
        ConfigError: If the folder is not a run's, or the run has not finished an epoch.
    """
    path = folder / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    if not rows:
        raise invalid("runs", "folders of runs with a finished epoch", f"{folder}, where metrics.jsonl has none")
    return rows


if __name__ == "__main__":
    main()
