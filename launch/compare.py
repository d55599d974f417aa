"""Compare runs: print a table of their results, and draw their curves into one figure.

``petra compare runs/a runs/b --out compare.png``
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from petra.errors import DataError, first_line, require

from .run.markdown import table
from .runtime.terminal import command

HEADER = ("run", "method", "d", "k", "epochs", "train loss", "test loss", "test accuracy", "best")
SUFFIXES = (".png", ".svg", ".pdf")


@command
def main(arguments: list[str] | None = None) -> None:
    """Print a Markdown table of the runs, finished or not, and draw their curves."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, help="folders of runs")
    parser.add_argument("--out", type=Path, help="PNG, SVG or PDF file for the curves")
    options = parser.parse_args(arguments)
    compare(options.runs, options.out)


def require_picture(out: Path) -> None:
    """Check the name of a file for a figure.

    Raises:
        ConfigError: If it has another suffix than those of :data:`SUFFIXES`.
    """
    require(out.suffix in SUFFIXES, "--out", "a file name that ends in .png, .svg or .pdf", out)


def compare(folders: Sequence[Path], out: Path | None) -> None:
    """Print the table of the runs in ``folders``, and draw their curves to the file ``out`` unless it is None.

    Raises:
        PetraError: If a folder is not a run's, one of its files is damaged, or ``out`` can't be written.
    """
    if out is not None:
        require_picture(out)
    from petra.analysis.plots import curves
    from petra.training.records import writing

    from .run.report import history, read_updates

    names = _names(folders)
    histories = {name: history(folder) for name, folder in zip(names, folders, strict=True)}
    print(table(HEADER, [_cells(name, folder, histories[name]) for name, folder in zip(names, folders, strict=True)]), end="")
    if out is not None:
        with writing(out):
            out.parent.mkdir(parents=True, exist_ok=True)
            curves(histories, out, "", {name: read_updates(folder) for name, folder in zip(names, folders, strict=True)})


def _names(folders: Sequence[Path]) -> list[str]:
    """Return the names of the runs: those of their folders, or their paths if two folders have the same name."""
    names = [folder.resolve().name for folder in folders]
    return names if len({*names}) == len(names) else [str(folder) for folder in folders]


def _cells(name: str, folder: Path, rows: Sequence[dict[str, Any]]) -> list[str]:
    config, last = _config(folder / "config.yaml"), rows[-1]
    accuracies = [row["test_accuracy"] for row in rows if "test_accuracy" in row]
    values = (
        name,
        OmegaConf.select(config, "method.name"),
        OmegaConf.select(config, "method.delay"),
        OmegaConf.select(config, "k"),
        f"{last['epoch']} of {OmegaConf.select(config, 'trainer.epochs')}",
        f"{last['train_loss']:.4f}",
        f"{last['test_loss']:.4f}",
        f"{last['test_accuracy']:.2%}" if "test_accuracy" in last else "",
        f"{max(accuracies):.2%}" if accuracies else "",
    )
    return [str(value) for value in values]


def _config(path: Path) -> DictConfig:
    try:
        config = OmegaConf.load(path)
    except Exception as error:  # a damaged file can raise many exceptions
        raise DataError(f"{path}: can't be read ({first_line(error)})") from error
    if not isinstance(config, DictConfig) or OmegaConf.select(config, "method.name") is None:
        raise DataError(f"{path}: expected the configuration of a run, got another file")
    return config


if __name__ == "__main__":
    main()
