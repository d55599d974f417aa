"""Compare runs: print a table of their results, and draw their curves into one figure.

``petra compare runs/a runs/b --out compare.png``
"""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import filter as matching
from pathlib import Path
from typing import Any

from petra.errors import DataError, first_line, require

from .run.folder import CHANGES, CONFIG, RECORD, epochs_in, flat, load_config, records_in, rows_of, updates_in
from .runtime.terminal import command, parser_for, table

HEADER = ("run", "data", "method", "d", "k", "epochs", "train loss", "test loss", "test accuracy", "best")


@command
def main(arguments: list[str] | None = None) -> None:
    """Print a Markdown table of the runs, finished or not, and draw their curves.

    FILE.jsonl stands for all of its records, and FILE.jsonl/NAME for one, with * in NAME for any text. Runs are named by their
    folders or records, or by their paths if two agree. A star marks those resumed with other settings.
    """
    parser = parser_for(__doc__)
    parser.add_argument("runs", nargs="+", type=Path, help="folders of runs, or records: FILE.jsonl, FILE.jsonl/NAME")
    parser.add_argument("--out", type=Path, help="PNG, SVG or PDF file for the curves")
    options = parser.parse_args(arguments)
    out = options.out
    require(out is None or out.suffix in (".png", ".svg", ".pdf"), "--out", "a file name that ends in .png, .svg or .pdf", out)
    found = [pair for path in options.runs for pair in _read(path)]
    names = [path.resolve().name.removesuffix(RECORD) for path, _ in found]
    names = names if len({*names}) == len(names) else [str(path) for path, _ in found]
    runs = dict(zip(names, [run for _, run in found], strict=True))
    print(table(HEADER, [_cells(name + run.get("mark", ""), run) for name, run in runs.items()]), end="")
    if out is not None:
        from petra.analysis.plots import curve_panels, grid, save
        from petra.training.records import writing

        with writing(out):
            out.parent.mkdir(parents=True, exist_ok=True)
            histories, updates = ({name: run[kind] for name, run in runs.items()} for kind in ("rows", "updates"))
            save(grid(curve_panels(histories, updates)), out)


def _read(path: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Yield the runs of a path: their ``setting`` (data, method, delay, k and epochs), ``rows``, ``updates`` and ``mark``."""
    file = next((each for each in (path, path.parent) if each.suffix == ".jsonl"), None)
    if file is None and not path.name.endswith(RECORD):
        rows, config = epochs_in(path), dict(flat(load_config(path / CONFIG)))
        setting = [config.get(key) for key in ("data._target_", "method.name", "method.delay", "k", "trainer.epochs")]
        yield path, {"setting": setting, "rows": rows, "updates": updates_in(path), "mark": "*" * (path / CHANGES).exists()}
        return
    records = records_in(file or path)
    chosen = matching(records, path.name) if file == path.parent else [*records]
    require(bool(chosen), str(path), "the name of a record, with * for any text", path.name)
    for name in chosen:
        content, place = records[name], path if file is None else file / name
        try:
            setting = [content[key] for key in ("data", "method", "delay", "k", "epochs")]
            yield place, {"setting": setting, "rows": rows_of(content["curve"]), "updates": rows_of(content["updates"])}
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise DataError(f"{place}: expected the record of a run, got another file ({first_line(error)})") from error


def _cells(name: str, run: dict[str, Any]) -> list[str]:
    last, (data, method, delay, k, epochs) = run["rows"][-1], run["setting"]
    accuracies = [row["test_accuracy"] for row in run["rows"] if "test_accuracy" in row]
    results = [f"{last[key]:.4f}" for key in ("train_loss", "test_loss")]
    results += [f"{accuracies[-1]:.2%}", f"{max(accuracies):.2%}"] if accuracies else ["", ""]
    return [name, str(data).rpartition(".")[2], str(method), str(delay), str(k), f"{last['epoch']} of {epochs}", *results]
