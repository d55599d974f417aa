"""Compare runs: print a table of their results, and draw their curves into one figure.

``petra compare runs/a runs/b --out compare.png``
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from omegaconf import OmegaConf

from petra.errors import DataError, first_line, require

from .run.markdown import table
from .runtime.terminal import command, parser_for

HEADER = ("run", "method", "d", "k", "epochs", "train loss", "test loss", "test accuracy", "best")
SUFFIXES = (".png", ".svg", ".pdf")


@command
def main(arguments: list[str] | None = None) -> None:
    """Print a Markdown table of the runs, finished or not, and draw their curves."""
    parser = parser_for(__doc__)
    parser.add_argument("runs", nargs="+", type=Path, help="folders of runs, or records of runs")
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
    """Print the table of runs, given their folders or records, and draw their curves to the file ``out`` unless it is None.

    Raises:
        PetraError: If a folder is not a run's, a file is damaged, or ``out`` can't be written.
    """
    if out is not None:
        require_picture(out)
    from petra.analysis.plots import curve_panels, grid, save
    from petra.training.records import writing

    runs = dict(zip(_names(folders), map(_read, folders), strict=True))
    print(table(HEADER, [_cells(name, run) for name, run in runs.items()]), end="")
    if out is not None:
        with writing(out):
            out.parent.mkdir(parents=True, exist_ok=True)
            histories, updates = ({name: getattr(run, kind) for name, run in runs.items()} for kind in ("rows", "updates"))
            save(grid(curve_panels(histories, updates)), out)


class _Curve(NamedTuple):
    """A run or its record: the cells of the table that state its setting, and its rows."""

    method: Any
    delay: Any
    k: Any
    epochs: Any
    rows: Sequence[dict[str, Any]]
    updates: Sequence[dict[str, Any]]


def _read(path: Path) -> _Curve:
    from .run.folder import RECORD, RunFolder, rows_of

    if not path.name.endswith(RECORD):
        run = RunFolder(path)
        rows, config = run.rows(), OmegaConf.create(run.config())
        method, delay, k, epochs = (OmegaConf.select(config, key) for key in ("method.name", "method.delay", "k", "trainer.epochs"))
        return _Curve(method, delay, k, epochs, rows, run.updates())
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        method, delay, k, epochs = (content[name] for name in ("method", "delay", "k", "epochs"))
        return _Curve(method, delay, k, epochs, rows_of(content["curve"]), rows_of(content["updates"]))
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise DataError(f"{path}: expected the record of a run, got another file ({first_line(error)})") from error


def _names(folders: Sequence[Path]) -> list[str]:
    """Return the names of the runs: those of their folders or records, or their paths if two have the same name."""
    from .run.folder import RECORD

    names = [folder.resolve().name.removesuffix(RECORD) for folder in folders]
    return names if len({*names}) == len(names) else [str(folder) for folder in folders]


def _cells(name: str, run: _Curve) -> list[str]:
    last = run.rows[-1]
    accuracies = [row["test_accuracy"] for row in run.rows if "test_accuracy" in row]
    values = (
        *(name, run.method, run.delay, run.k, f"{last['epoch']} of {run.epochs}"),
        *(f"{last['train_loss']:.4f}", f"{last['test_loss']:.4f}"),
        f"{last['test_accuracy']:.2%}" if "test_accuracy" in last else "",
        f"{max(accuracies):.2%}" if accuracies else "",
    )
    return [str(value) for value in values]


if __name__ == "__main__":
    main()
