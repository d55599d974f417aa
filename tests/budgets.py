"""Line budgets of all folders with code, and of the constructors of the core. One table; ``tests/test_structure.py`` checks it.

``python -m tests.budgets`` prints lines, limits and budgets. A limit is the size of a room before it meets its budget, rounded up.
Lower it when the room shrinks, down to the budget, and never raise it. A room's budget rises only by what another room gives up,
with the reason in docs/design.md; a budget is met by removing and moving code, not by packing lines or shortening docstrings.
"""

import subprocess
import sys
from dataclasses import fields, is_dataclass
from functools import cache
from importlib import import_module
from inspect import isclass, signature
from pathlib import Path
from typing import Any, NamedTuple, get_args, get_type_hints

from tests.structure import ROOT


class Budget(NamedTuple):
    """Lines or parameters: what is accepted today, and what is accepted once the rebuild has ended."""

    limit: int
    budget: int


ROOMS = {
    ("petra/*.py",): Budget(1_631, 1_631),
    ("petra/reversible",): Budget(607, 607),
    ("petra/plan",): Budget(934, 934),
    ("petra/transport",): Budget(695, 695),
    ("petra/engine",): Budget(1_918, 1_918),
    ("petra/engine/options",): Budget(2_285, 2_285),
    ("petra/staleness",): Budget(433, 433),
    ("petra/training",): Budget(1_736, 1_736),
    ("petra/data",): Budget(1_906, 1_906),
    ("petra/models",): Budget(1_530, 1_530),
    ("petra/inplace_abn",): Budget(1_695, 1_695),
    ("petra/elastic", "launch/elastic"): Budget(975, 975),
    ("petra/huggingface",): Budget(1_308, 1_308),
    ("petra/diagnostics",): Budget(698, 698),
    ("petra/cost_model",): Budget(1_528, 1_528),
    ("petra/analysis",): Budget(352, 352),
    ("launch/*.py", "launch/templates"): Budget(916, 916),
    ("launch/config",): Budget(768, 768),
    ("launch/run",): Budget(1_848, 1_848),
    ("launch/runtime",): Budget(655, 655),
    ("launch/doctor", "launch/selftest"): Budget(931, 931),
    ("launch/bench",): Budget(743, 743),
    ("reproduction",): Budget(2_212, 2_212),
    ("benchmarks",): Budget(3_303, 3_303),
    ("examples",): Budget(882, 882),
    ("tests", "stress"): Budget(17_234, 17_234),
    ("docs",): Budget(365, 365),
}
"""Folders of a room, with the folders inside that are no rooms of their own: lines of Python, docstrings included."""
BOTH = Budget(26_092, 26_092)
"""petra and launch together: 23,000, 2,500 that were reserved, and what tests and benchmarks have given up (docs/design.md)."""
CORE = Budget(6_012, 6_050)
"""Root, reversible, plan, transport, and what a plain run imports of the engine, wherever it lies."""
CORE_ROOMS = ("petra/*.py", "petra/reversible", "petra/plan", "petra/transport")
UNFORMATTED = Budget(4, 0)
"""Statements that the formatter is told to leave alone."""
CONFIGURATION = Budget(780, 900)
"""Lines of YAML in conf/."""
KEYS = Budget(110, 110)
"""Keys of the configuration: fields of the schema that are no groups, and parameters of shipped targets, each name once a group."""
PARAMETERS = {
    "petra.engine.stage:Stage": Budget(4, 4),
    "petra.engine.block:block_runner": Budget(5, 6),
    "petra.training.trainer:Trainer": Budget(8, 8),
    "petra.pipeline:Pipeline": Budget(9, 9),
}
"""Parameters of constructors and builders, as :func:`parameters` counts them."""
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


def room_of(path: Path) -> str | None:
    """Return the entry of :data:`ROOMS` that a file under the root of the checkout belongs to, or None."""
    places = [place for places in ROOMS for place in places]
    if (found := f"{path.parent}/*.py") in places:
        return found
    inside = [place for place in places if Path(place) in path.parents]
    return max(inside, key=len, default=None)


@cache
def sources() -> dict[Path, str | None]:
    """Return the room of each Python file that git tracks or would track."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.py"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    return {Path(name): room_of(Path(name)) for name in listed if (ROOT / name).exists()}


def count(path: Path) -> int:
    """Return the number of lines of a file."""
    return len((ROOT / path).read_text(encoding="utf-8").splitlines())


def size(*places: str) -> int:
    """Return the lines of the rooms with these folders."""
    return sum(count(path) for path, place in sources().items() if place in places)


def core_size() -> int:
    """Return the lines of the core: its rooms, and what a plain run imports of the engine."""
    done = subprocess.run([sys.executable, "-c", PLAIN_RUN], cwd=ROOT, capture_output=True, text=True, check=True)
    return size(*CORE_ROOMS) + sum(count(Path(name)) for name in done.stdout.split())


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


def main() -> None:
    """Print the table."""
    rows = [(", ".join(places), size(*places), budget) for places, budget in ROOMS.items()]
    rows += [("core, by imports", core_size(), CORE)]
    rows += [("petra, launch", sum(lines for name, lines, _ in rows if name.startswith(("petra", "launch"))), BOTH)]
    rows += [(name, parameters(name), budget) for name, budget in PARAMETERS.items()]
    for name, lines, (limit, budget) in rows:
        print(f"{name:40} {lines:6} of {limit:6}, budget {budget:6}")


if __name__ == "__main__":
    main()
