"""Configurations that are no files of their own: the methods of ``petra.method``, and the rows of tables of experiments.

Imports neither Hydra nor torch, because completion with TAB lists them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from petra.method import METHODS

from . import CONF

TABLES = "tables.yaml"
"""File of the tables. Each has ``about`` (a pattern that describes a row), ``base``, ``columns`` and ``rows``."""


def presets(group: str) -> dict[str, dict[str, Any]]:
    """Return the configurations of a group that are no files, by name."""
    if group == "method":
        return {name: {key: _plain(value) for key, value in asdict(method).items()} for name, method in METHODS.items()}
    return {name: node for name, _, node in _rows()} if group == "experiment" else {}


def purposes(group: str) -> dict[str, str]:
    """Return the names of all configurations of a group, files and presets, with the first line that describes each."""
    folder = Path(CONF, group)
    found = {str(path.relative_to(folder).with_suffix("")): _purpose(path) for path in sorted(folder.rglob("*.yaml"))}
    if group == "method":
        return dict(sorted({**{name: _switches(node) for name, node in presets(group).items()}, **found}.items()))
    rows = {name: about for name, about, _ in _rows()} if group == "experiment" else {}
    return dict(sorted({**found, **rows}.items()))


def _purpose(path: Path) -> str:
    lines = (line[2:] for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("# ") and "@package" not in line)
    return next(lines, "")


def _switches(node: dict[str, Any]) -> str:
    """Return the switches of a method: delay and keep always, the others if they are not off."""
    shown = {key: value for key, value in node.items() if key in ("delay", "keep") or value not in (False, None, node["name"])}
    return ", ".join(f"{key} {str(value).lower()}" for key, value in shown.items() if value != "current")


def _rows() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield name, description and configuration of each row of each table."""
    for folder, tables in yaml.safe_load(Path(CONF, TABLES).read_text(encoding="utf-8")).items():
        for table in tables:
            for name, values in table["rows"].items():
                row = dict(zip(table["columns"], values, strict=False))
                about = re.sub(r"\{(.*?)\}", partial(_value, row), table["about"])
                yield f"{folder}/{name}", about, _node(table["base"], row)


def _value(row: dict[str, Any], found: re.Match[str]) -> str:
    return str(row[found[1]])


def _node(base: dict[str, Any], row: dict[str, Any]) -> dict[str, Any]:
    """Return the base with the values of a row. A column with a dot is a key, one with a slash a group, any other a description."""
    node = {key: dict(value) if isinstance(value, dict) else value for key, value in base.items()}
    node["defaults"] = [*base["defaults"], *({f"override {key}": value} for key, value in row.items() if key.startswith("/"))]
    for column, value in row.items():
        group, dot, key = column.partition(".")
        if dot:
            node.setdefault(group, {})[key] = value
    return node


def _plain(value: Any) -> Any:
    """Return a value of a method as a file would state it."""
    return str(value) if isinstance(value, str) else value
