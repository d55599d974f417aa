"""Compare runs: print a table of their results, and draw their curves into one figure.

``petra compare runs/a runs/b --out compare.png``
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from petra.errors import DataError, first_line, require

from .run.folder import CHANGES, CONFIG, RECORD, epochs_in, flat, load_config, rows_of, updates_in
from .runtime.terminal import command, parser_for, table

HEADER = ("run", "data", "method", "d", "k", "epochs", "train loss", "test loss", "test accuracy", "best")


@command
def main(arguments: list[str] | None = None) -> None:
    """Print a Markdown table of the runs, finished or not, and draw their curves.

    Runs are named by their folders or records, or by their paths if two agree. A star marks those resumed with other settings.
    """
    parser = parser_for(__doc__)
    parser.add_argument("runs", nargs="+", type=Path, help="folders of runs, or records of runs")
    parser.add_argument("--out", type=Path, help="PNG, SVG or PDF file for the curves")
    options = parser.parse_args(arguments)
    folders, out = options.runs, options.out
    require(out is None or out.suffix in (".png", ".svg", ".pdf"), "--out", "a file name that ends in .png, .svg or .pdf", out)
    names = [folder.resolve().name.removesuffix(RECORD) for folder in folders]
    names = names if len({*names}) == len(names) else [str(folder) for folder in folders]
    runs = dict(zip(names, map(_read, folders), strict=True))
    print(table(HEADER, [_cells(name + run.get("mark", ""), run) for name, run in runs.items()]), end="")
    if out is not None:
        from petra.analysis.plots import curve_panels, grid, save
        from petra.training.records import writing

        with writing(out):
            out.parent.mkdir(parents=True, exist_ok=True)
            histories, updates = ({name: run[kind] for name, run in runs.items()} for kind in ("rows", "updates"))
            save(grid(curve_panels(histories, updates)), out)


def _read(path: Path) -> dict[str, Any]:
    """Return the ``setting`` of a run or its record (data, method, delay, k and epochs), ``rows``, ``updates`` and ``mark``."""
    if not path.name.endswith(RECORD):
        rows, config = epochs_in(path), dict(flat(load_config(path / CONFIG)))
        setting = [config.get(key) for key in ("data._target_", "method.name", "method.delay", "k", "trainer.epochs")]
        return {"setting": setting, "rows": rows, "updates": updates_in(path), "mark": "*" * (path / CHANGES).exists()}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        setting = [content[name] for name in ("data", "method", "delay", "k", "epochs")]
        return {"setting": setting, "rows": rows_of(content["curve"]), "updates": rows_of(content["updates"])}
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise DataError(f"{path}: expected the record of a run, got another file ({first_line(error)})") from error


def _cells(name: str, run: dict[str, Any]) -> list[str]:
    last, (data, method, delay, k, epochs) = run["rows"][-1], run["setting"]
    accuracies = [row["test_accuracy"] for row in run["rows"] if "test_accuracy" in row]
    results = [f"{last[key]:.4f}" for key in ("train_loss", "test_loss")]
    results += [f"{accuracies[-1]:.2%}", f"{max(accuracies):.2%}"] if accuracies else ["", ""]
    return [name, str(data).rpartition(".")[2], str(method), str(delay), str(k), f"{last['epoch']} of {epochs}", *results]
