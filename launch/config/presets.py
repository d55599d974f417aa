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
