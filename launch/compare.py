"""Compare runs: print a table of their results, and draw their curves into one figure.

``python -m launch.compare runs/a runs/b --out compare.png``
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from petra.errors import DataError, alternatives, first_line, invalid, require

from .run.markdown import table
from .runtime.terminal import command

PICTURES = (".png", ".pdf", ".svg")
HEADER = ("run", "method", "d", "k", "epochs", "train loss", "test loss", "test accuracy", "best")


@command
def main(arguments: list[str] | None = None) -> None:
    """Print a Markdown table of the runs, finished or not, and draw their curves."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, help="folders of runs")
    parser.add_argument("--out", type=Path, help="PNG, PDF or SVG file for the curves")
    options = parser.parse_args(arguments)
    suffix = None if options.out is None else options.out.suffix
    require(suffix in (None, *PICTURES), "--out", f"a file name that ends in {alternatives(PICTURES)}", options.out)
    from .run.folder import history

    histories = {folder: history(folder) for folder in options.runs}
    print(table(HEADER, [cells(folder, rows) for folder, rows in histories.items()]), end="")
    if options.out is not None:
        from petra.analysis.plots import curves
        from petra.training.records import writing

        with writing(options.out):
            options.out.parent.mkdir(parents=True, exist_ok=True)
            curves({folder.name: rows for folder, rows in histories.items()}, options.out, "")


def cells(folder: Path, rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a run's row of the table.

    Args:
        folder: Folder of the run.
        rows: Metrics of its epochs.

    Raises:
        DataError: If the run's configuration is damaged.
    """
    from omegaconf import OmegaConf

    path = folder / "config.yaml"
    try:
        config = OmegaConf.load(path)
        facts = [config.method.name, config.method.delay, config.k, f"{rows[-1]['epoch']} of {config.trainer.epochs}"]
    except Exception as error:  # a damaged file raises many types
        raise invalid(str(path), "the configuration of a run", first_line(error), DataError) from error
    last, accuracies = rows[-1], [row["test_accuracy"] for row in rows if "test_accuracy" in row]
    losses = [f"{last['train_loss']:.4f}", f"{last['test_loss']:.4f}"]
    shares = [f"{accuracies[-1]:.2%}", f"{max(accuracies):.2%}"] if accuracies else ["", ""]
    return [folder.name, *map(str, facts), *losses, *shares]


if __name__ == "__main__":
    main()
