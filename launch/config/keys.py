"""Keys of a configuration: parameters of functions and classes in petra, and fields of the schema.

A signature is read from the source, because an import of petra's rooms takes seconds.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import MISSING, dataclass, fields
from functools import cache
from inspect import cleandoc
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_type_hints

import petra
from petra.errors import ConfigError, accepted, accepts, alternatives, invalid

SAME_RESULTS = "same results"
"""Mark of a key or a group that a resumed run may change, because it changes no result except by rounding.

A key without this mark changes results: ``Annotated[int, "same results"]``. Paths have it; the length of a run doesn't count.
"""

NAMES = {"Annotated": Annotated, "Any": Any, "Literal": Literal, "Sequence": Sequence, "Path": Annotated[str, SAME_RESULTS]}
"""Names that an annotation may contain. A parameter with others is not checked here, but by what it configures."""


@dataclass
class Key:
    """A parameter or field.

    Attributes:
        hint: Its type.
        default: Its default; ``...`` if there is none.
        meaning: Its description in the docstring.
    """

    hint: Any
    default: Any
    meaning: str

    @property
    def same_results(self) -> bool:
        """Whether a resumed run may change it."""
        return any(SAME_RESULTS in getattr(hint, "__metadata__", ()) for hint in (self.hint, *get_args(self.hint)))

    @property
    def expected(self) -> str:
        """Description of the accepted values."""
        return alternatives(dict.fromkeys(accepted(self.hint) or ["a value"]))

    def read(self, name: str, value: Any) -> Any:
        """Return a value, as a string if only a string is accepted. ``name`` is the full name of the key, for the message.

        Raises:
            ConfigError: If the value is not accepted.
        """
        if value is ... or value == "???":
            raise invalid(name, self.expected, "nothing")
        for each in (value, str(value)) if isinstance(value, int | float) else (value,):
            if accepts(self.hint, each):
                return each
        raise invalid(name, self.expected, "null" if value is None else value)


def fields_of(schema: Any) -> dict[str, Key]:
    """Return the fields of a dataclass of the schema."""
    meanings, hints = descriptions(cleandoc(schema.__doc__ or "")), get_type_hints(schema, include_extras=True)
    return {
        entry.name: Key(
            hints[entry.name],
            (... if entry.default is MISSING else entry.default) if entry.default_factory is MISSING else entry.default_factory(),
            meanings.get(entry.name, ""),
        )
        for entry in fields(schema)
    }


def is_shipped(target: str) -> bool:
    """Return whether a target is one of petra's."""
    return target.startswith("petra.")


@cache
def signature(target: str) -> dict[str, Key]:
    """Return the parameters of a function or class in petra, in their order.

    Raises:
        ConfigError: If petra has no such function or class.
    """
    module, node = definition(target)
    found = {}
    for each in _with_bases(module, node):
        meanings = descriptions(ast.get_docstring(each) or "")
        for name, annotation, default in _parameters(each):
            value = ... if default is None else _literal(module, default)
            found[name] = Key(_hint(module, annotation), value, meanings.get(name, ""))
    return found


@cache
def definition(target: str) -> tuple[str, Any]:
    """Return the module of a function, class or constant in petra, and its statement.

    Raises:
        ConfigError: If petra has none of this name.
    """
    room, _, name = target.rpartition(".")
    for node in _statements(room):
        if getattr(node, "name", None) == name or (isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name):
            return room, node
        if isinstance(node, ast.ImportFrom) and name in (alias.name for alias in node.names):
            return definition(f"{node.module}.{name}")
    raise invalid("_target_", "a function or class of petra", target)


@cache
def _statements(module: str) -> list[ast.stmt]:
    path = Path(petra.__path__[0], *module.split(".")[1:])
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(path.read_text(encoding="utf-8")).body if is_shipped(f"{module}.") and path.is_file() else []


def _with_bases(module: str, node: Any) -> list[Any]:
    """Return the base classes of a class in the same module, and the class or function itself."""
    names = {*map(ast.unparse, getattr(node, "bases", ()))}
    return [*(each for each in _statements(module) if getattr(each, "name", None) in names), node]


def _parameters(node: Any) -> Iterator[tuple[str, ast.expr | None, ast.expr | None]]:
    """Yield name, annotation and default of each parameter of a function or constructor, or of each field of a dataclass."""
    own = [part for part in node.body if isinstance(part, ast.FunctionDef) and part.name == "__init__"]
    if isinstance(node, ast.ClassDef) and not own:
        yield from (
            (ast.unparse(part.target), part.annotation, part.value) for part in node.body if isinstance(part, ast.AnnAssign)
        )
        return
    arguments = (own or [node])[0].args
    plain = [*arguments.posonlyargs, *arguments.args]
    defaults = [*[None] * (len(plain) - len(arguments.defaults)), *arguments.defaults, *arguments.kw_defaults]
    for argument, default in zip([*plain, *arguments.kwonlyargs], defaults, strict=True):
        if argument.arg != "self":
            yield argument.arg, argument.annotation, default


def _hint(module: str, annotation: ast.expr | None) -> Any:
    """Return the type that an annotation names. Names of constants and enumerations in petra are followed."""
    if annotation is None:
        return Any
    known = dict(NAMES)
    for name in {node.id for node in ast.walk(annotation) if isinstance(node, ast.Name)} - known.keys():
        with suppress(ConfigError):
            room, node = definition(f"{module}.{name}")
            if isinstance(node, ast.Assign):
                known[name] = _hint(room, node.value)
            elif "StrEnum" in map(ast.unparse, getattr(node, "bases", ())):
                known[name] = Literal[tuple(_members(node).values())]
    try:
        return eval(ast.unparse(annotation), known)
    except (NameError, TypeError):
        return Any


def _literal(module: str, node: ast.expr) -> Any:
    """Return the value of a default: a literal, or a constant of petra, or a member of an enumeration."""
    if isinstance(node, ast.Attribute):
        kind = definition(f"{module}.{ast.unparse(node.value)}")[1]
        return _members(kind)[node.attr]
    if isinstance(node, ast.Name):
        room, assignment = definition(f"{module}.{node.id}")
        return _literal(room, assignment.value)
    value = ast.literal_eval(node)
    return list(value) if isinstance(value, tuple) else value


def _members(enumeration: ast.ClassDef) -> dict[str, str]:
    """Return the values of an enumeration by name."""
    return {ast.unparse(node.targets[0]): ast.literal_eval(node.value) for node in enumeration.body if isinstance(node, ast.Assign)}


def descriptions(docstring: str) -> dict[str, str]:
    """Return the descriptions of parameters or attributes in a docstring, by name."""
    found = dict[str, str]()
    for section in re.findall(r"^(?:Args|Attributes):\n((?: .*\n?|\n(?= ))+)", docstring, re.MULTILINE):
        for names, text in re.findall(r"^    (\w[\w, ]*): ((?:.*\n?)(?:      .*\n?)*)", section, re.MULTILINE):
            found |= dict.fromkeys(names.split(", "), " ".join(text.split()))
    return found
