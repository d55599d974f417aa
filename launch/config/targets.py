"""Parameters of the functions and classes in petra that a configuration names as ``_target_``, without importing them.

They are read from the source: an import of petra's rooms takes seconds, because it imports torch.
"""

from __future__ import annotations

import ast
import re
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin

import petra
from petra import errors
from petra.errors import invalid

_NAMES = {**vars(errors), "Annotated": Annotated, "Any": Any, "Literal": Literal, "Path": str, "Sequence": list, "Mapping": dict}
"""Names in annotations. A path or a sequence is a string or a list in a configuration."""


class Parameter(NamedTuple):
    """One parameter.

    Attributes:
        annotation: Type, with checks in ``Annotated``; ``Any`` if a configuration can't state it.
        default: Default; ``...`` if there is none.
        meaning: Description in the docstring; empty if it has none.
    """

    annotation: Any
    default: Any
    meaning: str


class Definition(NamedTuple):
    """A function or class.

    Attributes:
        module: Source of its module.
        node: Its syntax tree.
    """

    module: ast.Module
    node: ast.FunctionDef | ast.ClassDef


def is_shipped(target: str) -> bool:
    """Return whether a target is one of petra's."""
    return target.startswith("petra.")


@cache
def parameters(target: str) -> dict[str, Parameter]:
    """Return the parameters of a function or class in petra by name, in their order.

    Raises:
        ConfigError: If petra has no such function or class.
    """
    module, node = definition(target)
    meanings = descriptions(ast.get_docstring(node) or "")
    if isinstance(node, ast.ClassDef):
        function = next((part for part in node.body if isinstance(part, ast.FunctionDef) and part.name == "__init__"), None)
        pairs = _fields(module, node) if function is None else _arguments(function)
    else:
        pairs = _arguments(node)
    return {name: Parameter(_kind(module, a), _default(module, d), meanings.get(name, "")) for name, (a, d) in pairs.items()}


@cache
def definition(target: str) -> Definition:
    """Return a function or class in petra, given by the name under which it can be imported.

    Raises:
        ConfigError: If petra has no such function or class.
    """
    room, _, name = target.rpartition(".")
    for node in (module := _module(room)).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name:
            return Definition(module, node)
        if isinstance(node, ast.ImportFrom) and name in (alias.name for alias in node.names):
            return definition(f"{node.module}.{name}")
    raise invalid("_target_", "a function or class of petra", target)


@cache
def _module(name: str) -> ast.Module:
    """Return the source of a module in petra; an empty one if there is no such module."""
    path = Path(petra.__path__[0], *name.split(".")[1:])
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(path.read_text(encoding="utf-8") if name.startswith("petra") and path.is_file() else "")


def descriptions(docstring: str) -> dict[str, str]:
    """Return the descriptions of parameters or attributes in a docstring, by name."""
    found = dict[str, str]()
    for section in re.findall(r"^(?:Args|Attributes):\n((?: .*\n?|\n(?= ))+)", docstring, re.MULTILINE):
        for names, text in re.findall(r"^    (\w[\w, ]*): ((?:.*\n?)(?:      .*\n?)*)", section, re.MULTILINE):
            found |= dict.fromkeys(names.split(", "), " ".join(text.split()))
    return found


def _arguments(function: ast.FunctionDef) -> dict[str, tuple[ast.expr | None, ast.expr | None]]:
    """Return annotation and default of each argument."""
    plain = [*function.args.posonlyargs, *function.args.args]
    defaults = [*[None] * (len(plain) - len(function.args.defaults)), *function.args.defaults, *function.args.kw_defaults]
    pairs = zip([*plain, *function.args.kwonlyargs], defaults, strict=True)
    return {argument.arg: (argument.annotation, default) for argument, default in pairs if argument.arg != "self"}


def _fields(module: ast.Module, node: ast.ClassDef) -> dict[str, tuple[ast.expr | None, ast.expr | None]]:
    """Return annotation and default of each field of a dataclass and of its bases in the same module."""
    bases = {base.id for base in node.bases if isinstance(base, ast.Name)}
    parents = [part for part in module.body if isinstance(part, ast.ClassDef) and part.name in bases]
    own = {
        p.target.id: (p.annotation, p.value) for p in node.body if isinstance(p, ast.AnnAssign) and isinstance(p.target, ast.Name)
    }
    return {**{name: pair for parent in parents for name, pair in _fields(module, parent).items()}, **own}


def _kind(module: ast.Module, annotation: ast.expr | None) -> Any:
    """Evaluate an annotation. The names that it may contain are known without an import."""
    try:
        kind = eval(ast.unparse(annotation), {**_NAMES, **_constants(module)}) if annotation else Any
    except (NameError, TypeError):
        return Any
    return Annotated[str, errors.one_of(get_args(kind))] if get_origin(kind) is Literal else kind


def _default(module: ast.Module, default: ast.expr | None) -> Any:
    """Return a default, a list for a tuple."""
    if default is None:
        return ...
    value = _constant(module, default.id) if isinstance(default, ast.Name) else ast.literal_eval(default)
    return list(value) if isinstance(value, tuple) else value


def _constant(module: ast.Module, name: str) -> Any:
    """Return a constant of a module, which may have imported it from another one."""
    if name in (known := _constants(module)):
        return known[name]
    sources = (node.module for node in module.body if isinstance(node, ast.ImportFrom) and name in (a.name for a in node.names))
    return _constant(_module(str(next(sources))), name)


@cache
def _constants(module: ast.Module) -> dict[str, Any]:
    """Return the constants of a module that are literals."""
    found = dict[str, Any]()
    for node in module.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            with suppress(ValueError):
                found[node.targets[0].id] = ast.literal_eval(node.value)
    return found
