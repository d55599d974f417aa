"""Compare runs: print a table of their settings and results, and draw their curves into one figure.

``petra compare runs/a runs/b --out compare.png``
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from fnmatch import filter as matching
from pathlib import Path
from typing import Any

from petra.errors import DataError, first_line, require
from petra.method import METHODS

from .config.schema import SECTIONS
from .config.words import as_word
from .run.folder import (
    CHANGES,
    CONFIG,
    RECORD,
    best_accuracy,
    checked,
    epochs_in,
    flat,
    load_config,
    records_in,
    rows_of,
    summary_in,
    updates_in,
)
from .runtime.terminal import command, parser_for, path_argument, table

ALWAYS = {"data": "data", "method": "method.name", "d": "method.delay", "k": "k"}
"""Columns of every table, with their keys."""
RESULTS = ("epochs", "train loss", "test loss", "test accuracy", "best test accuracy")
QUALIFYING = ("data.split", "trainer.limit_batches", "trainer.label_smoothing", "trainer.bootstrap", "optim.average")
"""Keys that say of what the results are. They have a column if a run has set one."""
RECORDED = {
    **{"data": "data", "method": "method.name", "delay": "method.delay", "k": "k", "epochs": "trainer.epochs", "model": "model"},
    **{"optimizer": "optim", "learning_rate": "optim.lr", "batch_size": "data.batch_size", "seed": "seed", "remedy": "remedies"},
    "architecture": "architecture",
}
"""Fields of a record, with their keys."""
UNCOMPARED = ("format", "run_dir", "resume", "resume_change", "trainer.epochs", *ALWAYS.values())
"""Keys without a column of their own."""
LONGEST_LABEL = 60
"""Letters of the labels of a figure. If the settings that differ need more, runs are named by their folders."""


@command
def main(arguments: list[str] | None = None) -> None:
    """Print a Markdown table of the runs, finished or not, and draw their curves.

    FILE.jsonl stands for all of its records, and FILE.jsonl/NAME for one, with * in NAME for any text. Runs are named by their
    folders or records, or by their paths if two agree. A star marks those resumed with other settings.
    """
    parser = parser_for(__doc__)
    parser.add_argument("runs", nargs="+", type=path_argument, help="folders of runs, or records: FILE.jsonl, FILE.jsonl/NAME")
    parser.add_argument("--out", type=path_argument, help="PNG, SVG or PDF file for the curves")
    options = parser.parse_args(arguments)
    out = options.out
    require(out is None or out.suffix in (".png", ".svg", ".pdf"), "--out", "a file name that ends in .png, .svg or .pdf", out)
    runs = _read_all(options.runs)
    print(_table(runs), end="")
    if out is not None:
        from petra.analysis.plots import curve_panels, grid, save
        from petra.training.records import writing

        with writing(out):
            out.parent.mkdir(parents=True, exist_ok=True)
            labels = _labels(runs)
            histories, updates = ({labels[name]: run[kind] for name, run in runs.items()} for kind in ("rows", "updates"))
            save(grid(curve_panels(histories, updates)), out)


def comparison(folders: Sequence[Path]) -> str:
    """Return a Markdown table of runs, with a column for each key in which they differ.

    Raises:
        PetraError: If one is not a run's folder or record, has not finished an epoch, or a file is damaged.
    """
    return _table(_read_all(folders))


def _read_all(paths: Sequence[Path]) -> dict[str, dict[str, Any]]:
    """Return the runs (:func:`_read`) by name."""
    found = [pair for path in paths for pair in _read(path)]
    names = [path.resolve().name.removesuffix(RECORD) for path, _ in found]
    names = names if len({*names}) == len(names) else [str(path) for path, _ in found]
    for name in names:
        require(names.count(name) == 1, "command line", "each run once", f"{name} twice")
    return dict(zip(names, [run for _, run in found], strict=True))


def _read(path: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Yield the runs of a path: their ``settings`` by key, ``rows``, ``updates`` and ``mark``."""
    file = next((each for each in (path, path.parent) if each.suffix == ".jsonl"), None)
    if file is None and not path.name.endswith(RECORD):
        rows, settings = epochs_in(path), _settings(load_config(path / CONFIG))
        summary_in(path)  # raises if it is that of other epochs
        yield path, {"settings": settings, "rows": rows, "updates": updates_in(path), "mark": "*" * (path / CHANGES).exists()}
        return
    records = records_in(file or path)
    chosen = matching(records, path.name) if file == path.parent else [*records]
    require(bool(chosen), str(path), "the name of a record, with * for any text", path.name)
    for name in chosen:
        content, place = records[name], path if file is None else file / name
        try:
            settings = {key: content[field] for field, key in RECORDED.items()}
            rows, updates = rows_of(content["curve"]), rows_of(content["updates"])
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise DataError(f"{place}: expected the record of a run, got another file ({first_line(error)})") from error
        require(bool(rows), str(place), "a finished epoch", "none", DataError)
        rows, updates = checked(rows, place, "epoch", "train_loss", "test_loss"), checked(updates, place)
        yield place, {"settings": settings, "rows": rows, "updates": updates, "mark": ""}


def _settings(config: dict[str, Any]) -> dict[str, Any]:
    """Return the values of a configuration by key: targets by their group, no keys of a method that only repeat its definition."""
    found = {key.removesuffix("._target_"): value for key, value in flat(config)}
    usual = METHODS.get(found.get("method.name", ""))
    return {
        key: str(value).rpartition(".")[2] if key in SECTIONS else value
        for key, value in found.items()
        if key in ALWAYS.values() or not key.startswith("method") or value != getattr(usual, key.removeprefix("method."), None)
    }


def _differing(runs: Mapping[str, dict[str, Any]]) -> list[str]:
    """Return the keys in which runs differ, without those that every table has.

    Between run folders and records: keys of both. Between networks of two kinds, a parameter that only one kind has counts if
    networks of that kind differ in it; so do those of optimizers, and of other sections.
    """
    known = [run["settings"] for run in runs.values()]
    keys = dict.fromkeys(key for settings in known for key in settings)
    if len({"architecture" in settings for settings in known}) > 1:
        keys = dict.fromkeys(key for key in keys if all(key in settings for settings in known))
    kinds = {key for key in SECTIONS if len({_shown(settings, key) for settings in known}) > 1}
    having = {key: [each for each in known if key in each or key.partition(".")[0] not in kinds] for key in keys}
    return [key for key in keys if key not in UNCOMPARED and len({_shown(settings, key) for settings in having[key]}) > 1]


def _shown(settings: Mapping[str, Any], key: str) -> str:
    """Return a value as on the command line; nothing if there is none."""
    return as_word(settings[key]) if key in settings else ""


def _table(runs: Mapping[str, dict[str, Any]]) -> str:
    said = [key for key in QUALIFYING if any(run["settings"].get(key) not in (None, "", 0.0) for run in runs.values())]
    differing = list(dict.fromkeys([*_differing(runs), *said]))
    header = ["run", *ALWAYS, *differing, *RESULTS]
    return table(header, [_cells(name + run["mark"], run, [*ALWAYS.values(), *differing]) for name, run in runs.items()])


def _cells(name: str, run: Mapping[str, Any], keys: Sequence[str]) -> list[str]:
    last, settings = run["rows"][-1], run["settings"]
    results = [f"{last[key]:.4f}" for key in ("train_loss", "test_loss")]
    results += [f"{last['test_accuracy']:.2%}", f"{best_accuracy(run['rows']):.2%}"] if "test_accuracy" in last else ["", ""]
    return [name, *(_shown(settings, key) for key in keys), f"{last['epoch']} of {settings.get('trainer.epochs')}", *results]


def _labels(runs: Mapping[str, dict[str, Any]]) -> dict[str, str]:
    """Return the label of each run in a figure: the settings that differ, or the name if they are many or equal."""
    known = [run["settings"] for run in runs.values()]
    keys = [key for key in ALWAYS.values() if len({_shown(settings, key) for settings in known}) > 1] + _differing(runs)
    labels = [", ".join(f"{key}={_shown(settings, key)}" for key in keys if _shown(settings, key)) for settings in known]
    fits = len({*labels}) == len(labels) and all(0 < len(label) <= LONGEST_LABEL for label in labels)
    return dict(zip(runs, labels if fits else runs, strict=True))
