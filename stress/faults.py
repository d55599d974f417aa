"""Plant faults in the code, one at a time, and report which ones the tests catch: ``python -m stress.faults --count 40 --seed 1``.

A fault is a change of the syntax tree: a flipped comparison, a negated condition, another constant, a dropped argument, a removed
statement. Faults are drawn by a seed over :data:`PLACES`. The tests that start no process run once, to record which functions each
of them enters. For each fault, a forked process replaces the code of its function and runs the tests that enter it, the fastest
first, until one fails. ``--again FILE`` plants the faults of an earlier run again, wherever their functions are now. Exits with
status 1 if a fault is missed.
"""

import ast
import gc
import json
import os
import random
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import pytest
from _pytest.runner import runtestprotocol

from stress.frame import parser_of
from tests.structure import ROOT

PLACES = {
    "petra/*.py": 5,
    "petra/reversible/*.py": 4,
    "petra/plan/*.py": 4,
    "petra/transport/*.py": 4,
    "petra/engine/*.py": 15,
    "petra/engine/options/*.py": 8,
}
"""Files by pattern, with how many of 40 faults they get."""
TESTS = [f"tests/{name}" for name in ("engine", "plan", "reversible", "transport", "test_distributed.py")]
PROCESSOR, WALL = 15, 1200
"""Seconds of one processor, and on the clock, for the tests of a fault."""

COMPARED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    **{ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq},
    **{ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In},
}
ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    **{ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv},
}


@dataclass(frozen=True)
class Fault:
    """A change of one node.

    Attributes:
        path: File.
        function: Qualified name of the function.
        kind: Kind of change.
        before: Source of the node.
        number: Number of changes of this kind with the same source before it in the function.
        after: Source of the changed node.
    """

    path: str
    function: str
    kind: str
    before: str
    number: int
    after: str

    @property
    def name(self) -> str:
        return f"{self.path}:{self.function}: {self.before} -> {self.after}" + f" ({self.number})" * bool(self.number)


def changes(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """Yield kinds of changes of one node, with the changed node."""
    match node:
        case ast.Compare(left, [op], right) if type(op) in COMPARED:
            yield "comparison", ast.Compare(left, [COMPARED[type(op)]()], right)
        case ast.BinOp(left, op, right) if type(op) in ARITHMETIC:
            yield "arithmetic", ast.BinOp(left, ARITHMETIC[type(op)](), right)
        case ast.BoolOp(op, values):
            yield "and, or", ast.BoolOp(ast.And() if isinstance(op, ast.Or) else ast.Or(), values)
        case ast.Constant(bool() as value):
            yield "constant", ast.Constant(not value)
        case ast.Constant(int() as value):
            yield "constant", ast.Constant(value + 1)
        case ast.If(test, body, orelse):
            yield "condition", ast.If(ast.UnaryOp(ast.Not(), test), body, orelse)
        case ast.IfExp(test, body, orelse):
            yield "condition", ast.IfExp(ast.UnaryOp(ast.Not(), test), body, orelse)
        case ast.Call(function, args, keywords) if keywords or len(args) > 1:
            yield "argument", ast.Call(function, args if keywords else args[:-1], keywords[:-1])
        case ast.Return(ast.expr()):
            yield "return", ast.Return(ast.Constant(None))
        case ast.Expr(ast.Call()) | ast.AugAssign() | ast.Assign([ast.Attribute()]) if "super()" not in ast.unparse(node):
            yield "statement", ast.Pass()


def walk(node: ast.AST, outer: str = "", function: str = "") -> Iterator[tuple[ast.AST, str]]:
    """Yield each node inside a function with the function's qualified name, without messages and annotations."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Raise | ast.JoinedStr | ast.arguments):
            continue
        if isinstance(child, ast.FunctionDef | ast.ClassDef):
            name = f"{outer}{child.name}"
            is_class = isinstance(child, ast.ClassDef)
            for part in child.body:
                if not is_class:
                    yield part, name
                inside = ast.Module([part], []) if isinstance(part, ast.FunctionDef | ast.ClassDef) else part
                yield from walk(inside, f"{name}." if is_class else f"{name}.<locals>.", "" if is_class else name)
        else:
            if function:
                yield child, function
            yield from walk(child, outer, function)


def pairs(root: Path, path: Path) -> Iterator[tuple[Fault, ast.Module, ast.AST, ast.AST]]:
    """Yield all faults of a file, with its tree, the node and what replaces it."""
    tree = ast.parse((root / path).read_text(encoding="utf-8"))
    seen: dict[tuple[str, ...], int] = {}
    for node, function in walk(tree):
        for kind, changed in changes(node):
            before, after = (ast.unparse(ast.fix_missing_locations(n)).partition("\n")[0] for n in (node, changed))
            key = (function, kind, before)
            seen[key] = seen.get(key, -1) + 1
            yield Fault(str(path), function, kind, before, seen[key], after), tree, node, changed


def files(root: Path, pattern: str) -> list[Path]:
    """Return the files of a pattern below ``root``."""
    return sorted(path.relative_to(root) for path in root.glob(pattern))


def draw(root: Path, count: int, seed: int) -> list[Fault]:
    """Draw faults over :data:`PLACES`."""
    source, drawn = random.Random(seed), []
    for pattern, weight in PLACES.items():
        found = [fault for path in files(root, pattern) for fault, *_ in pairs(root, path)]
        drawn += source.sample(found, round(count * weight / sum(PLACES.values())))
    return drawn


class Replace(ast.NodeTransformer):
    """Replaces one node of a tree."""

    def __init__(self, node: ast.AST, changed: ast.AST) -> None:
        self.node, self.changed = node, changed

    def visit(self, node: ast.AST) -> Any:
        return self.changed if node is self.node else self.generic_visit(node)


def changed_tree(root: Path, fault: Fault) -> tuple[Path, ast.Module] | None:
    """Return the file that contains a fault's function now, and its tree with the fault, or None."""
    for path in sorted(files(root, "petra/**/*.py"), key=lambda path: str(path) != fault.path):
        if fault.function.rpartition(".")[2] not in (root / path).read_text(encoding="utf-8"):
            continue
        for found, tree, node, changed in pairs(root, path):
            if (found.function, found.kind, found.before, found.number) == (fault.function, fault.kind, fault.before, fault.number):
                return path, ast.fix_missing_locations(Replace(node, changed).visit(tree))
    return None


def plant(fault: Fault) -> bool:
    """Replace the code of a fault's function in this process. Return whether the function still exists."""
    if (found := changed_tree(ROOT, fault)) is None:
        return False
    file, outermost = str(ROOT / found[0]), fault.function.partition(".<locals>")[0]
    (code,) = (code for code in codes(compile(found[1], file, "exec")) if code.co_qualname == outermost)
    own = [f for f in gc.get_objects() if type(f) is FunctionType and f.__code__.co_filename == file]
    own = [f for f in own if f.__code__.co_qualname == outermost]
    for function in own:
        function.__code__ = code
    return bool(own)


def codes(code: CodeType) -> Iterator[CodeType]:
    """Yield all code objects inside of one."""
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from codes(constant)


class Faults:
    """Plugin of pytest that runs the collected tests as the module's text says.

    Args:
        faults: What to plant.
        reached: File of what each test enters. Tests that it lacks are added.
        output: JSON file of the results.
    """

    def __init__(self, faults: list[Fault], reached: Path, output: Path) -> None:
        self.faults, self.reached, self.output, self.missed = faults, reached, output, 0

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Record what the tests enter, and plant the faults."""
        rows = self._rows()
        for item in session.items:
            if item.nodeid not in rows:
                forked(lambda item=item: self._record(item), PROCESSOR * 10)
        rows, results = self._rows(), []
        for fault in self.faults:
            entering = [i for i in session.items if fault.function in rows.get(i.nodeid, (0, ()))[1]]
            entering.sort(key=lambda item: rows[item.nodeid][0])
            begun = time.monotonic()
            with tempfile.NamedTemporaryFile("r") as file:
                status = forked(lambda fault=fault, items=entering, name=file.name: self._try(fault, items, name), PROCESSOR)
                by = file.read() or f"status {status}" * (status not in (0, 2, None, -signal.SIGXCPU))
            result = "gone" if status == 2 else "caught" if by else "MISSED"
            self.missed += result == "MISSED"
            facts = {"result": result, "by": by, "tests": len(entering), "seconds": round(time.monotonic() - begun, 1)}
            results.append(asdict(fault) | facts)
            print(f"{result}: {fault.name}  {by or f'({len(entering)} tests)'}", flush=True)
            self.output.write_text(json.dumps(results, indent=1) + "\n")
        return True

    def _rows(self) -> dict[str, tuple[float, set[str]]]:
        lines = self.reached.read_text().splitlines() if self.reached.exists() else []
        return {name: (seconds, {*functions}) for name, seconds, functions in map(json.loads, lines)}

    def _record(self, item: pytest.Item) -> int:
        entered, begun = set[CodeType](), time.process_time()
        sys.settrace(lambda frame, event, argument: entered.add(frame.f_code))  # type: ignore[func-returns-value]
        runtestprotocol(item, nextitem=None, log=False)
        sys.settrace(None)
        names = sorted({code.co_qualname for code in entered if code.co_filename.startswith(f"{ROOT}/petra/")})
        with self.reached.open("a") as file:
            file.write(json.dumps([item.nodeid, time.process_time() - begun, names]) + "\n")
        return 0

    def _try(self, fault: Fault, items: list[pytest.Item], name: str) -> int:
        if not plant(fault):
            return 2
        for item, following in zip(items, [*items[1:], None], strict=False):
            if any(report.failed for report in runtestprotocol(item, nextitem=following, log=False)):
                Path(name).write_text(item.nodeid)
                return 1
        return 0


def forked(function: Any, seconds: int) -> int | None:
    """Call a function in a forked process for at most some seconds of processor time. Return its result, None if it hangs."""
    if (pid := os.fork()) == 0:
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 5))
        status = 3
        with suppress(BaseException):
            status = function()
        os._exit(status)
    deadline = time.monotonic() + WALL
    while time.monotonic() < deadline:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.05)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return None


def main() -> None:
    """Entry point."""
    parser = parser_of(__doc__)
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--again", type=Path, metavar="FILE", help="plant the faults of this file")
    parser.add_argument("--reached", type=Path, metavar="FILE", help="what each test enters; tests that it lacks are added")
    parser.add_argument("--output", type=Path, default=Path("faults.json"))
    options = parser.parse_args()
    faults = draw(ROOT, options.count, options.seed)
    if options.again:
        faults = [Fault(**{key: row[key] for key in Fault.__dataclass_fields__}) for row in json.loads(options.again.read_text())]
    with tempfile.TemporaryDirectory() as folder:
        plugin = Faults(faults, options.reached or Path(folder) / "reached", options.output)
        arguments = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--timeout", "0", "-m", "not processes", *TESTS]
        status = pytest.main(arguments, plugins=[plugin])
    print(f"{len(faults)} faults, {plugin.missed} missed")
    sys.exit(bool(plugin.missed or status))


if __name__ == "__main__":
    main()
