"""Configurations that are no files of their own: the methods of ``petra.method``, and the rows of tables of experiments.

Imports neither Hydra nor torch, because completion with TAB lists them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from petra.method import METHODS

from . import CONF

METHOD = "petra.method.Method"
TABLES = "tables.yaml"
"""File of the tables. Each has ``about`` (a pattern that describes a row), ``base``, ``columns`` and ``rows``."""


def presets(group: str) -> dict[str, dict[str, Any]]:
    """Return the configurations of a group that are no files, by name."""
    return {name: node for name, _, node in _presets(group)}


@cache
def configurations(group: str) -> dict[str, tuple[str, dict[str, Any]]]:
    """Return the configurations of a group, files and presets, by name: the line that describes each, and its content."""
    found = {name: (about, node) for name, about, node in _presets(group)}
    for path in Path(CONF, group).rglob("*.yaml"):
        text = path.read_text(encoding="utf-8")
        about = next((line[2:] for line in text.splitlines() if line.startswith("# ") and "@package" not in line), "")
        found[str(path.relative_to(Path(CONF, group)).with_suffix(""))] = about, yaml.safe_load(text) or {}
    return dict(sorted(found.items()))


def purposes(group: str) -> dict[str, str]:
    """Return the names of all configurations of a group with the line that describes each."""
    return {name: about for name, (about, _) in configurations(group).items()}


@cache
def targets(group: str) -> tuple[str, ...]:
    """Return the names of the functions and classes in petra that the configurations of a group name as ``_target_``."""
    return tuple(dict.fromkeys(node["_target_"] for _, node in configurations(group).values() if "_target_" in node))


def _presets(group: str) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield name, description and configuration of each method, and of each row of the tables of a group."""
    for method in METHODS.values() if group == "method" else ():
        node = {key: str(value) if isinstance(value, str) else value for key, value in asdict(method).items()}
        shown = {key: value for key, value in node.items() if key in ("delay", "keep") or value not in (False, None, method.name)}
        about = ", ".join(f"{key} {str(value).lower()}" for key, value in shown.items() if value != "current")
        yield method.name, about, {"_target_": METHOD, **node}
    for table in yaml.safe_load(Path(CONF, TABLES).read_text(encoding="utf-8")).get(group, ()):
        for name, values in table["rows"].items():
            row = dict(zip(table["columns"], values, strict=False))
            about = table["about"]
            for column, value in row.items():
                about = about.replace(f"{{{column}}}", str(value))
            yield table.get("folder", "") + name, about, _node(table["base"], row)


def _node(base: dict[str, Any], row: dict[str, Any]) -> dict[str, Any]:
    """Return the base with the values of a row.

    A column with a dot is a key of a group, one with a slash a group, one in capitals a description, any other a key.
    """
    node = {key: dict(value) if isinstance(value, dict) else value for key, value in base.items()}
    if "defaults" in base:
        node["defaults"] = [*base["defaults"], *({f"override {key}": value} for key, value in row.items() if key.startswith("/"))]
    for column, value in row.items():
        group, dot, key = column.partition(".")
        if dot:
            node.setdefault(group, {})[key] = value
        elif not column.startswith("/") and not column.isupper():
            node[column] = value
    return node
