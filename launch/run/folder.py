"""The folder of a run as data: its configuration, which its checkpoints have, too, and its records. Imports no torch.

A damaged file is a :class:`petra.errors.DataError`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from itertools import pairwise
from math import isnan, nan
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from petra.errors import ConfigError, DataError, first_line, invalid, require

from ..config.catalogue import all_keys, configurations
from ..config.compose import hydra_errors, to_config
from ..config.keys import definition, fields_of, is_shipped
from ..config.schema import SECTIONS, Config, keys

CONFIG, METRICS, UPDATES, SUMMARY, CHECKPOINTS = "config.yaml", "metrics.jsonl", "updates.jsonl", "summary.json", "checkpoints"
GRADIENTS = "gradients.jsonl"
CHANGES = "changes.jsonl"
"""Settings that were changed when the run was resumed."""
RECORD = ".record.json"
"""How the name of a record's file ends: a finished run in one file, see docs/evidence/records/README.md."""
FORMAT = 4
"""Layout of run folders and checkpoints: it changes with the keys of the configuration. Layout 3 is read, too."""
LAST_READERS = {1: "f6a0b0a2", 2: "c9a6d9dd"}
"""The last commit that reads each earlier layout. The first had no number."""
TRUST = "--trust"
"""Flag of commands that read the folder of a run: import code outside of petra that its configuration names."""


def as_data(config: Config) -> dict[str, Any]:
    """Return a configuration as a file contains it."""
    found = {"format": FORMAT, **asdict(config)}
    for group in SECTIONS:
        found[group] |= {**found[group].pop("rules", {}), **found[group].pop("options")}
    return found


def require_format(found: Mapping[Any, Any], source: Path) -> dict[str, Any]:
    """Check the layout of a file that contains a configuration, and return its content in the current one.

    Raises:
        ConfigError: If it is a layout that can't be read.
    """
    found, number = upgraded(found), found.get("format", 1)
    reader = f"; commit {LAST_READERS[number]} is the last that reads it" if number in LAST_READERS else ""
    require(found.get("format") == FORMAT, str(source), f"a run of format {FORMAT}", f"one of format {number}{reader}")
    return found


def upgraded(found: Mapping[Any, Any]) -> dict[str, Any]:
    """Return a configuration in the current layout, if it is one of layout 3 or 4; others are returned as they are.

    In layout 3, ``trainer.streams`` was one key for two. What petra has gained since it was written gets its defaults: parameters
    of its functions, and groups with a file ``none``.
    """
    found = dict(found)
    if found.get("format") == 3:
        trainer = {**(found.get("trainer") or {})}
        streams = trainer.pop("streams", None)
        trainer |= {"exact_streams": streams == "exact", "message_format": None if streams in ("float32", "exact") else streams}
        found |= {"format": FORMAT, "trainer": trainer}
    for group in SECTIONS if found.get("format") == FORMAT else ():
        values = found.get(group, configurations(group).get("none", ("", None))[1])
        if isinstance(values, Mapping) and is_shipped(target := str(values.get("_target_"))):
            with suppress(ConfigError):  # read_config refuses functions that petra no longer has
                defaults = {name: key.default for name, key in keys(group, target).items() if key.default is not ...}
                found[group] = {**defaults, **values}
    return found


def load_config(path: Path) -> dict[str, Any]:
    """Return the content of a config.yaml.

    Raises:
        PetraError: If the file can't be read, or is of another format.
    """
    try:
        found: Any = OmegaConf.to_container(OmegaConf.load(path))
    except Exception as error:  # a damaged file can raise many exceptions
        raise DataError(f"{path}: can't be read ({first_line(error)})") from error
    require(isinstance(found, dict), str(path), "the configuration of a run", "another file", DataError)
    return require_format(found, path)


def read_config(path: Path, overrides: DictConfig, *, trusted: bool) -> Config:
    """Return the configuration of a run with overrides.

    Args:
        path: A config.yaml.
        overrides: Keys to change.
        trusted: Whether the file may name code outside of petra.

    Raises:
        PetraError: If the file is damaged or of another format, names code that is not trusted, or an override doesn't fit it.
    """
    found = load_config(path)
    del found["format"]
    for key, target in _targets(found):
        if is_shipped(target):
            definition(target)  # raises if petra has none
        elif not trusted:
            raise ConfigError(f"{key}: expected a function of petra, got {target}; {TRUST} imports it")
    with hydra_errors():
        composed = OmegaConf.merge(found, overrides)
        assert isinstance(composed, DictConfig)
        return to_config(composed)


def names_foreign_code(config: Config) -> bool:
    """Return whether a configuration names code outside of petra, which a command imports from a run's folder with ``--trust``."""
    return not all(is_shipped(target) for _, target in _targets(as_data(config)))


def _targets(value: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield each ``_target_`` in mappings and lists with its key."""
    for name, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        if name == "_target_":
            yield f"{prefix}{name}", str(inner)
        yield from _targets(inner, f"{prefix}{name}.")


def differences(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return the keys in which two configurations differ, with the values of both."""
    before, now = dict(flat(found)), dict(flat(wanted))
    return {key: (a, b) for key in dict.fromkeys([*now, *before]) if (a := before.get(key)) != (b := now.get(key))}


def changes_results(key: str) -> bool:
    """Return whether a key changes what is computed: all do, except those that have a mark or are in a group with one."""
    entries = (all_keys().get(key), fields_of(Config).get(key.partition(".")[0]))
    return not any(entry is not None and entry.same_results for entry in entries)


def flat(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the full name (``trainer.epochs``) and the value of each key of a configuration."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def epochs_in(folder: Path) -> list[dict[str, Any]]:
    """Return the rows of metrics.jsonl in a run's folder, one for each epoch.

    Raises:
        ConfigError: If the folder is not a run's, or the run has not finished an epoch.
    """
    rows = _rows(folder / METRICS, "epoch", "microbatches", "train_loss", "test_loss")
    if not rows:
        raise invalid("runs", "folders of runs with a finished epoch", f"{folder}, where {METRICS} has none")
    for a, b in pairwise(row["epoch"] for row in rows):
        require(a < b, str(folder / METRICS), "epochs in order", f"{b} after {a}", DataError)
    return rows


def best_accuracy(rows: Sequence[Mapping[str, Any]]) -> float:
    """Return the highest test accuracy of some epochs, of which some may have none; NaN if none has one."""
    known = [row["test_accuracy"] for row in rows if not isnan(row.get("test_accuracy", nan))]
    return max(known, default=nan)


def updates_in(folder: Path, clock: int | None = None) -> list[dict[str, Any]]:
    """Return the rows of updates.jsonl, up to ``clock`` microbatches, or none if there is no such file."""
    return [row for row in _rows(folder / UPDATES, "microbatches") if clock is None or row["microbatches"] <= clock]


def gradients_in(folder: Path, clock: int | None = None) -> list[dict[str, Any]]:
    """Return the rows of gradients.jsonl, of the first ``clock`` microbatches, or none if there is no such file."""
    rows = _rows(folder / GRADIENTS, "microbatch", "stage", "reconstruction_error")
    return [row for row in rows if clock is None or row["microbatch"] < clock]


def summary_in(folder: Path) -> dict[str, Any]:
    """Return the content of summary.json, or nothing if the run is not complete."""
    path = folder / SUMMARY
    try:
        content: Any = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: can't be read ({first_line(error)})") from error
    require(isinstance(content, dict), str(path), "a JSON object", type(content).__name__, DataError)
    content |= {key: nan for key in content if key.startswith(("train_", "test_")) and content[key] is None}
    if path.exists():
        from petra.training.records import read_rows

        known = [[str(row.get(key)) for key in ("microbatches", "test_loss")] for row in read_rows(folder / METRICS)]
        own = [str(content.get(key)) for key in ("microbatches", "test_loss")]
        require(own in known or not known, str(path), f"the summary of {METRICS}", "another", DataError)
    return dict(content)


def _rows(path: Path, *keys: str) -> list[dict[str, Any]]:
    """Return the rows of a file, all of which must have numbers under ``keys``."""
    from petra.training.records import read_rows

    return checked(read_rows(path), path, *keys)


def checked(rows: list[dict[str, Any]], path: Path, *keys: str) -> list[dict[str, Any]]:
    """Return rows of a file, all of which must have numbers under ``keys``."""
    for number, row in enumerate(rows, 1):
        for key in (*keys, *(row.keys() - {"sample"})):
            expected = f"a number {key} in line {number}"
            require(isinstance(row.get(key), int | float), str(path), expected, row.get(key, "none"), DataError)
    return rows


def records_in(path: Path, pattern: str = "*.json") -> dict[str, dict[str, Any]]:
    """Return records by name, in the order of names: of a file of JSON lines (.jsonl), a folder with a file for each, or one file.

    Args:
        pattern: Pattern of the names of files in a folder.

    Raises:
        DataError: If a file can't be read, or holds something else or two records of the same name.
    """
    in_lines, found = path.suffix == ".jsonl", dict[str, dict[str, Any]]()
    for source in sorted(path.glob(pattern)) if path.is_dir() else [path]:
        try:
            text = source.read_text(encoding="utf-8")
            for content in map(json.loads, text.splitlines() if in_lines else [text]):
                record = dict(content)
                name = record.pop("name") if in_lines else source.name.removesuffix(RECORD).removesuffix(".json")
                require(name not in found, str(source), "one record of each name", f"two of {name}", DataError)
                found[name] = record
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise DataError(f"{source}: expected the record of a run, got another file ({first_line(error)})") from error
    return dict(sorted(found.items()))


def rows_of(columns: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Return the rows of a table in a record. A row lacks the columns in which it has no value."""
    found = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    return [{name: value for name, value in row.items() if value is not None} for row in found]
