"""The configurations that petra has: their files, the targets that these name, and all keys."""

from __future__ import annotations

from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from petra.method import METHODS

from .keys import Key
from .schema import GROUPS, METHOD, keys

CONF = str(Path(__file__).parents[2] / "conf")
"""Folder of the configuration files."""


@cache
def configurations(group: str) -> dict[str, tuple[str, dict[str, Any]]]:
    """Return the configurations of a group by name: the line that describes each, and its content, as a file contains it."""
    found = dict[str, tuple[str, dict[str, Any]]]()
    for name, method in METHODS.items() if group == "method" else ():
        node = {key: str(value) if isinstance(value, str) else value for key, value in asdict(method).items()}
        own = {key: value for key, value in node.items() if key in ("delay", "keep") or value not in (False, None, name, "current")}
        found[name] = ", ".join(f"{key} {str(value).lower()}" for key, value in own.items()), {"_target_": METHOD, **node}
    for path in Path(CONF, group).rglob("*.yaml"):
        text = path.read_text(encoding="utf-8")
        about = next((line[2:] for line in text.splitlines() if line.startswith("# ") and "@package" not in line), "")
        found[str(path.relative_to(Path(CONF, group)).with_suffix(""))] = about, yaml.safe_load(text) or {}
    return dict(sorted(found.items()))


@cache
def targets(group: str) -> tuple[str, ...]:
    """Return the names of the functions and classes in petra that the configurations of a group name as ``_target_``."""
    return tuple(dict.fromkeys(node["_target_"] for _, node in configurations(group).values() if "_target_" in node))


@cache
def all_keys() -> dict[str, Key]:
    """Return the keys of all configurations by their full names: of the schema, and of all targets of petra."""
    found = dict(keys())
    for group in GROUPS:
        for target in targets(group) or ("",):
            found = {**{f"{group}.{name}": key for name, key in keys(group, target).items()}, **found}
    return found
