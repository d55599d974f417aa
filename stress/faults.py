"""Plant faults in the code, one at a time, and report which ones the tests catch: ``python -m stress.faults --count 40 --seed 1``.

A fault is a change of the syntax tree: a flipped comparison, a negated condition, another constant, a dropped argument, a removed
statement. Faults are drawn by a seed over :data:`PLACES` and planted in a copy of the checkout. The tests run once to record which
functions each of them enters. A fault then meets the tests that enter its function, the fastest first, or, if there are none, those
that start processes. ``--again FILE`` plants the faults of an earlier run again, wherever their functions are now, and
``--code COMMIT`` takes ``petra/``, ``launch/`` and ``conf/`` from a commit. Exits with status 1 if a fault is missed that is not in
:data:`EQUIVALENT`.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
PLACES = {
    "petra/*.py": 5,
    "petra/reversible/*.py": 4,
    "petra/plan/*.py": 4,
    "petra/transport/*.py": 4,
    "petra/engine/*.py": 13,
    "petra/engine/options/*.py": 6,
    "petra/training/*.py": 4,
}
"""Files by pattern, with how many of 40 faults they get."""
TESTS = [*(f"tests/{name}" for name in ("engine", "plan", "reversible", "transport", "training", "test_distributed.py"))]
EQUIVALENT: dict[str, str] = {}
"""Faults that change no behaviour, by name, with the reason."""
REACHED = "PETRA_REACHED"
"""Environment variable with the file to which this module writes, as a plugin of pytest, what each test enters."""
PROCESSOR, WALL = 100, 1200
"""Seconds of one processor, and on the clock, for the tests of a fault."""
MOST = 300
"""Number of tests that a fault meets."""

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
        case ast.Expr(ast.Call()) | ast.AugAssign() | ast.Assign([ast.Attribute()]):
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


def locate(root: Path, fault: Fault) -> tuple[Path, str] | None:
    """Return the file that contains a fault's function now, and its source with the fault, or None."""
    for path in sorted(files(root, "petra/**/*.py"), key=lambda path: str(path) != fault.path):
        if fault.function.rpartition(".")[2] not in (root / path).read_text(encoding="utf-8"):
            continue
        for found, tree, node, changed in pairs(root, path):
            if (found.function, found.kind, found.before, found.number) == (fault.function, fault.kind, fault.before, fault.number):
                return path, ast.unparse(ast.fix_missing_locations(Replace(node, changed).visit(tree)))
    return None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Any:
    """Write the functions of petra that a test enters, if :data:`REACHED` names a file."""
    if (target := os.environ.get(REACHED)) is None:
        return (yield)
    codes, begun = set(), time.monotonic()
    sys.settrace(lambda frame, event, argument: codes.add(frame.f_code))  # type: ignore[func-returns-value]
    try:
        return (yield)
    finally:
        sys.settrace(None)
        root = f"{Path.cwd()}/petra/"
        entered = sorted({code.co_qualname for code in codes if code.co_filename.startswith(root)})
        with open(target, "a", encoding="utf-8") as file:
            file.write(json.dumps([item.nodeid, time.monotonic() - begun, entered]) + "\n")


def run_tests(copy: Path, *arguments: str, limit: int, **environment: str) -> tuple[int | None, str]:
    """Run tests in a copy for some seconds of processor time. Return the exit status, None if they hang, and the output."""
    variables = {**os.environ, "PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1", **environment}
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "--timeout", "300", *arguments]
    limited = partial(resource.setrlimit, resource.RLIMIT_CPU, (limit, limit + 5))
    process = subprocess.Popen(
        command, cwd=copy, env=variables, text=True, stdout=-1, stderr=subprocess.STDOUT, start_new_session=True, preexec_fn=limited
    )
    try:
        printed, _ = process.communicate(timeout=WALL)
        return process.returncode, printed
    except subprocess.TimeoutExpired:
        return None, ""
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def reached(copy: Path, target: Path) -> dict[str, list[str]]:
    """Return the tests that enter each function, the fastest first. Run those that start no process unless ``target`` has them."""
    if not target.exists():
        run_tests(copy, "-p", "stress.faults", "-m", "not processes", *TESTS, limit=3600, **{REACHED: str(target)})
    found: dict[str, list[str]] = {}
    for test, _, functions in sorted(map(json.loads, target.read_text().splitlines()), key=lambda row: row[1]):
        for function in functions:
            found.setdefault(function, []).append(test)
    return found


def caught(copy: Path, fault: Fault, tests: list[str]) -> str | None:
    """Plant a fault in a copy and run tests. Return how it was caught, "" if it was not, and None if its function is gone."""
    if (located := locate(copy, fault)) is None:
        return None
    path, source = located
    original = (copy / path).read_text(encoding="utf-8")
    room = f"tests/{path.parts[1]}"
    folders = [folder for folder in dict.fromkeys([room, "tests/engine"]) if (copy / folder).is_dir()]
    try:
        (copy / path).write_text(source, encoding="utf-8")
        status, printed = run_tests(copy, "-x", *(tests[:MOST] or ["-m", "processes", *folders]), limit=PROCESSOR)
    finally:
        (copy / path).write_text(original, encoding="utf-8")
    if status in (0, 5, -signal.SIGXCPU, None):
        return ""
    failed = [line for line in printed.splitlines() if line.startswith(("FAILED", "ERROR", "E  "))]
    return (failed or [f"status {status}"])[-1][:200]


def copied(folder: Path, code: str | None) -> Path:
    """Copy the tracked files to a folder; take the code from a commit if one is named."""
    subprocess.run("git ls-files -z | xargs -0 cp --parents -t " + str(folder), shell=True, cwd=ROOT, check=True)
    if code is not None:
        places = ["petra", "launch", "conf"]
        subprocess.run(["rm", "-rf", *places], cwd=folder, check=True)
        archive = subprocess.run(["git", "archive", code, *places], cwd=ROOT, check=True, capture_output=True)
        subprocess.run(["tar", "x"], cwd=folder, input=archive.stdout, check=True)
    subprocess.run("git init -q && git add -A", shell=True, cwd=folder, check=True)
    return folder


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--again", type=Path, metavar="FILE", help="plant the faults of this file")
    parser.add_argument("--code", metavar="COMMIT", help="commit of petra, launch and conf; default: the working tree")
    parser.add_argument("--reached", type=Path, metavar="FILE", help="what each test enters; written if it does not exist")
    parser.add_argument("--output", type=Path, default=Path("faults.json"))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        copy = copied(Path(folder), options.code)
        if options.again:
            faults = [
                Fault(**{key: row[key] for key in Fault.__dataclass_fields__}) for row in json.loads(options.again.read_text())
            ]
        else:
            faults = draw(copy, options.count, options.seed)
        tests = reached(copy, (options.reached or Path(folder) / "reached.jsonl").absolute())
        rows, missed = [], 0
        for fault in faults:
            begun = time.monotonic()
            by = caught(copy, fault, tests.get(fault.function, []))
            missed += by == "" and fault.name not in EQUIVALENT
            result = "gone" if by is None else "caught" if by else EQUIVALENT.get(fault.name, "MISSED")
            rows.append({**asdict(fault), "result": result, "by": by, "seconds": round(time.monotonic() - begun, 1)})
            print(f"{result}: {fault.name}  {by or ''}", flush=True)
            options.output.write_text(json.dumps(rows, indent=1) + "\n")
    print(f"{len(faults)} faults, {missed} missed")
    sys.exit(bool(missed))


if __name__ == "__main__":
    main()
