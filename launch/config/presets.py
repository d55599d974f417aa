"""Configurations of a group: the files under conf/, and the methods of ``petra.method``, which have none.

Imports neither Hydra nor torch, because completion with TAB lists them.
"""

from __future__ import annotations

from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from petra.method import METHODS

from . import CONF

METHOD = "petra.method.Method"


def method_presets() -> dict[str, dict[str, Any]]:
    """Return the configurations of the methods by name, as files would contain them."""
    switches = {name: asdict(method).items() for name, method in METHODS.items()}
    return {
        name: {"_target_": METHOD, **{key: str(value) if isinstance(value, str) else value for key, value in items}}
        for name, items in switches.items()
    }


@cache
def configurations(group: str) -> dict[str, tuple[str, dict[str, Any]]]:
    """Return the configurations of a group by name: the line that describes each, and its content."""
    found = dict[str, tuple[str, dict[str, Any]]]()
    for name, node in method_presets().items() if group == "method" else ():
        shown = {key: value for key, value in node.items() if key in ("delay", "keep") or value not in (False, None, name, METHOD)}
        about = ", ".join(f"{key} {str(value).lower()}" for key, value in shown.items() if value != "current")
        found[name] = about, node
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
