"""The structure that docs/design.md describes: rooms in layers, and pieces small enough to read."""

import ast
import re
import tomllib
from collections import defaultdict
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

import pytest

from tests.structure import ROOT, WHOLE, core_lines, imports, modules, parameters, room, room_imports

PETRA = (
    *(
        "errors",
        "torch_private",
        "update_rules",
        "message_formats",
        "quantization",
        "specs",
        "settings",
        "hooks",
        "reversible",
        "distributed",
    ),
    *("method", "model", "plan", "transport", "engine", "staleness", "pipeline", "diagnostics", "cost_model", "analysis", "data"),
    *("models", "inplace_abn", "training", "elastic", "huggingface", "__main__"),
)
"""Rooms of petra/, from the bottom up: a room imports only rooms before it."""
LAUNCH = ("templates", "config", "runtime", "run", "elastic", "doctor", "bench", "selftest")
"""Rooms of launch/, from the bottom up. The commands at its root come last. ``reproduction/`` is above them all."""
CORE_LINES = 6_600
PARAMETERS = {
    "petra.engine.stage:Stage": 4,
    "petra.engine.block:block_runner": 6,
    "petra.training.trainer:Trainer": 8,
    "petra.pipeline:Pipeline": 9,
}
"""Parameters of constructors and builders, as :func:`tests.structure.parameters` counts them."""


def test_every_room_has_a_place() -> None:
    found = {room(name) for name in modules(ROOT)} - {"petra", "launch", WHOLE}
    rooms = {name for name in found if name.startswith("petra.") or (ROOT / name.replace(".", "/")).is_dir()}
    assert rooms == {f"petra.{name}" for name in PETRA} | {f"launch.{name}" for name in LAUNCH}


def test_rooms_import_only_rooms_below() -> None:
    order = {name: i for i, name in enumerate([*(f"petra.{name}" for name in PETRA), *(f"launch.{name}" for name in LAUNCH)])}
    commands = len(order)
    order[WHOLE] = commands + 1
    upward = [(a, b) for a, b in room_imports(ROOT) if order.get(b, commands) > order.get(a, commands)]
    assert not upward


def test_no_circular_imports() -> None:
    imported = defaultdict[str, set[str]](set)
    for importer, name in imports(ROOT):
        imported[importer].add(name)
    TopologicalSorter(imported).prepare()  # raises CycleError, which names the circle


def nodes(*kinds: type[ast.AST]) -> list[tuple[Path, Any]]:
    """Return the syntax nodes of some kinds in all modules, each with the path of its file."""
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in modules(ROOT).values()}
    return [(path, node) for path, tree in trees.items() for node in ast.walk(tree) if isinstance(node, kinds)]


def test_files_and_functions_are_short() -> None:
    assert not [path for path in modules(ROOT).values() if len(path.read_text(encoding="utf-8").splitlines()) > 500]
    assert len([*(ROOT / "petra").glob("*.py")]) <= 13
    assert not [(path, f.name) for path, f in nodes(ast.FunctionDef, ast.AsyncFunctionDef) if f.end_lineno - f.lineno > 59]


@pytest.mark.processes
def test_the_core_is_read_in_one_sitting() -> None:
    """What a plain run imports of the engine counts, so that code does not leave the core by changing its folder only."""
    lines = core_lines()
    assert lines <= CORE_LINES, f"the core has {lines} lines, more than {CORE_LINES}: attach what only some runs need from outside"


@pytest.mark.parametrize("name", PARAMETERS)
def test_constructors_take_few_parameters(name: str) -> None:
    assert parameters(name) <= PARAMETERS[name]


def test_lines_are_not_packed() -> None:
    """The formatter's settings decide how many lines a statement has."""
    ruff = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["ruff"]
    assert ruff["line-length"] == 132
    assert "format" not in ruff


def test_no_private_attribute_of_another_object_is_read() -> None:
    """Only ``self`` and ``cls`` use the underscored names that our classes define. Names of ``nn.Module`` are torch's."""
    sources = {path: path.read_text(encoding="utf-8") for path in modules(ROOT).values()}
    own = {name for text in sources.values() for name in re.findall(r"self\.(_[a-z]\w*)\s*(?::[^=\n]+)?=[^=]", text)}
    own -= {"_parameters", "_buffers", "_modules"}
    for path, text in sources.items():
        used = {(owner, name) for owner, name in re.findall(r"\b(\w+(?:\.\w+)*)\.(_[a-z]\w*)", text) if name in own}
        assert not [(o, n) for o, n in used if o not in ("self", "cls")], path
