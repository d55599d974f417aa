"""The structure of the code: files, imports between rooms, functions.

A room is a folder of ``petra/`` or ``launch/``, a file at the root of either, or ``reproduction/``.
"""

import ast
import subprocess
import sys
from dataclasses import fields, is_dataclass
from importlib import import_module
from inspect import isclass, signature
from pathlib import Path
from typing import Any, get_args, get_type_hints

ROOT = Path(__file__).parents[1]
PACKAGES = ("petra", "launch")
WHOLE = "reproduction"
"""Package that is one room. The wheel doesn't contain it."""
CORE = ("petra/*.py", "petra/reversible/**/*.py", "petra/plan/**/*.py", "petra/transport/**/*.py")
"""Files of the core, which has also what a plain run imports of the engine, wherever it lies."""
PLAIN_RUN = """
import sys
import torch
from torch import nn
from petra import BlockSpec, Model, Pipeline, Recipe, TensorSpec

class Zeros:
    def inputs(self, m): return torch.zeros(2, 8)
    def targets(self, m): return torch.zeros(2, dtype=torch.int64)

pipeline = Pipeline(
    Model("plain", (BlockSpec("a", lambda: nn.Linear(8, 8)), BlockSpec("b", lambda: nn.Linear(8, 4)))),
    TensorSpec((2, 8), torch.float32),
    Recipe(lambda module: torch.optim.SGD(module.parameters(), lr=0.1)),
)
pipeline.train(Zeros(), 4)
print(*(module.__file__ for name, module in sys.modules.items() if name.startswith("petra.engine")), sep="\\n")
"""


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


def core_lines() -> int:
    """Return the lines of the core, docstrings included."""
    done = subprocess.run([sys.executable, "-c", PLAIN_RUN], cwd=ROOT, capture_output=True, text=True, check=True)
    paths = {path for pattern in CORE for path in ROOT.glob(pattern)} | {Path(name) for name in done.stdout.split()}
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in paths)


def parameters(name: str) -> int:
    """Return the parameters of a constructor or builder. An object that users don't make counts as many as it has fields."""
    module, _, member = name.partition(":")
    function = getattr(import_module(module), member)
    hints = get_type_hints(function.__init__ if isclass(function) else function)
    return sum(_weight(hints.get(parameter)) for parameter in signature(function).parameters)


def _weight(hint: Any) -> int:
    """Return the largest number of fields of the data classes in a type that their packages don't export, and at least 1."""
    found = [each for each in (hint, *get_args(hint)) if isclass(each)]
    own = [each for each in found if each.__name__ not in exported(each.__module__)]
    return max([1, *(len(fields(each)) if is_dataclass(each) else len(getattr(each, "_fields", ())) for each in own)])


def exported(module: str) -> set[str]:
    """Return the public names of the packages that contain a module."""
    parts = module.split(".")
    packages = (sys.modules.get(".".join(parts[:i])) for i in range(1, len(parts) + 1))
    return {name for package in packages for name in getattr(package, "__all__", ())}
