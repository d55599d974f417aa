"""The structure of the code: files, imports between rooms, functions.

A room is a folder of ``petra/`` or ``launch/``, a file at the root of either, or ``reproduction/``.
"""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("petra", "launch")
WHOLE = "reproduction"
"""Package that is one room. The wheel doesn't contain it."""


def modules(root: Path) -> dict[str, Path]:
    """Return the path of each module by its dotted name; packages by the name of their folder."""
    found = {}
    for path in sorted(path for package in (*PACKAGES, WHOLE) for path in (root / package).rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(root: Path) -> set[tuple[str, str]]:
    """Return all (importer, imported) pairs of modules."""
    known = modules(root)
    pairs = set()
    for name, path in known.items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                pairs |= {(name, alias.name) for alias in node.names if alias.name in known}
            elif isinstance(node, ast.ImportFrom) and (source := imported_module(node, name, path)) in known:
                members = {f"{source}.{alias.name}" for alias in node.names}
                pairs |= {(name, member if member in known else source) for member in members}
    return pairs


def imported_module(node: ast.ImportFrom, name: str, path: Path) -> str:
    """Return the absolute name of the module in a ``from ... import`` of module ``name``."""
    if not node.level:
        return node.module or ""
    parts = name.split(".")
    package = parts[: len(parts) - node.level + (path.stem == "__init__")]
    return ".".join([*package, *filter(None, [node.module])])


def room(module: str) -> str:
    """Return the room of a module: ``petra.engine.worker`` is in ``petra.engine``, ``petra.pipeline`` is a room of its own."""
    return WHOLE if module.startswith(f"{WHOLE}.") else ".".join(module.split(".")[:2])


def room_imports(root: Path) -> set[tuple[str, str]]:
    """Return all (importer, imported) pairs of different rooms. The public names of ``petra/__init__.py`` are no room."""
    pairs = {(room(a), room(b)) for a, b in imports(root)}
    return {(a, b) for a, b in pairs if a != b and not {a, b} & set(PACKAGES)}
