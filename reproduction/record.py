"""Records: what a finished run computed, in one file that doesn't depend on the keys of the configuration."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from statistics import mean
from typing import Any

from omegaconf import OmegaConf

from launch.run.folder import RECORD, epochs_in, gradients_in, records_in, updates_in
from petra.errors import DataError, first_line
from petra.training.records import write_text_atomically, writing

POINTS = 200
"""Rows of updates that a record has at most."""
DIGITS, DIGITS_OF_ROWS = 7, 5
"""Significant digits of the summary and of epochs, and of the rows of updates and gradients."""
DROPPED = ("model_options", "layout")
"""Keys of summary.json that a record doesn't have."""
Row = dict[str, Any]
Columns = dict[str, list[float | None]]


@dataclass(frozen=True)
class Record:
    """A finished run. records/README.md states what each field is, with its unit."""

    setting: str
    also: list[str]
    scale: str
    method: str
    remedy: str
    delay: int | list[int]
    k: int
    seed: int
    batch_size: int
    stages: int
    optimizer: str
    learning_rate: float
    model: str
    architecture: str
    parameters: int
    data: str
    epochs: int
    commit: str | None
    machine: str
    summary: dict[str, Any]
    curve: Columns
    updates: Columns
    gradients: Columns


def record_of(
    folder: Path, setting: str, commit: str | None, machine: str, *, scale: str = "cpu", also: Sequence[str] = ()
) -> Record:
    """Return the record of the finished run in a folder. See :class:`Record` for the arguments.

    Raises:
        PetraError: If the folder is not a run's, the run has not finished an epoch, or a file is damaged.
    """
    try:
        found = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
        config = OmegaConf.load(folder / "config.yaml")
        optimizer, learning_rate = (
            OmegaConf.select(config, "optim._target_").rpartition(".")[2],
            float(OmegaConf.select(config, "optim.lr")),
        )
        promoted = {field.name: found.pop(field.name) for field in fields(Record) if field.name in found}
        architecture = ", ".join(f"{name} {value}" for name, value in found["model_options"].items())
    except (OSError, ValueError, TypeError, LookupError) as error:
        raise DataError(f"{folder}: expected the folder of a finished run, got none ({first_line(error)})") from error
    return Record(
        **promoted,
        setting=setting,
        also=[*also],
        scale=scale,
        optimizer=optimizer,
        learning_rate=learning_rate,
        architecture=architecture,
        commit=commit,
        machine=machine,
        summary=_rounded({name: value for name, value in found.items() if name not in DROPPED}, DIGITS),
        curve=_columns([_first_stage(row) for row in epochs_in(folder)], DIGITS),
        updates=_columns(_thinned(updates_in(folder)), DIGITS_OF_ROWS),
        gradients=_columns(gradients_in(folder), DIGITS_OF_ROWS),
    )


def write_record(folder: Path, record: Record) -> Path:
    """Write a record into a folder, in a file with the name of its setting, and return its path.

    Raises:
        DataError: If it can't be written.
    """
    path = folder / f"{record.setting}{RECORD}"
    lines = [f"  {json.dumps(name)}: {_text(value)}" for name, value in vars(record).items()]
    with writing(path):
        folder.mkdir(parents=True, exist_ok=True)
    write_text_atomically(path, "{\n" + ",\n".join(lines) + "\n}\n")
    return path


def read_records(path: Path) -> Iterator[tuple[Path, Record]]:
    """Yield records with their paths, in the order of their names: those in a folder, in a file of JSON lines, or in one file.

    Raises:
        DataError: If a file can't be read, or a record lacks a field or has another one.
    """
    for name, content in records_in(path, f"*{RECORD}").items():
        try:
            yield path / name, Record(**content)
        except TypeError as error:
            raise DataError(f"{path / name}: expected a record, got another file ({first_line(error)})") from error


def _first_stage(row: Row) -> Row:
    return {name: value for name, value in row.items() if not name.startswith("stage/") or name.startswith("stage/1/")}


def _thinned(rows: Sequence[Row]) -> list[Row]:
    """Return means over successive rows, with the counts of the last of them. A value may be missing in some rows."""
    size = -(-len(rows) // POINTS)
    if size <= 1:
        return [*rows]
    found = []
    for group in (rows[i : i + size] for i in range(0, len(rows), size)):
        names = dict.fromkeys(name for row in group for name in row)
        means = {name: mean(row[name] for row in group if name in row) for name in names}
        found.append(means | {name: group[-1][name] for name in ("microbatches", "updates") if name in group[-1]})
    return found


def _columns(rows: Sequence[Row], digits: int) -> Columns:
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: _rounded([row.get(name) for row in rows], digits) for name in names}


def _rounded(value: Any, digits: int) -> Any:
    if isinstance(value, dict):
        return {name: _rounded(element, digits) for name, element in value.items()}
    if isinstance(value, list):
        return [_rounded(element, digits) for element in value]
    return float(f"{value:.{digits}g}") if isinstance(value, float) else value


def _text(value: Any) -> str:
    """Return a value as JSON: an object with a line for each name, anything else in one line."""
    if not isinstance(value, dict) or not value:
        return json.dumps(value)
    return "{\n" + ",\n".join(f"    {json.dumps(name)}: {json.dumps(element)}" for name, element in value.items()) + "\n  }"
