"""Keys of a configuration: parameters of functions and classes in petra, and fields of the schema.

A signature is read from the source, because an import of petra's rooms takes seconds.
"""

from __future__ import annotations

import ast
import sys
from dataclasses import MISSING, dataclass, fields
from datetime import date
from functools import cache
from importlib import import_module
from inspect import Parameter
from inspect import signature as inspected
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

import petra
from petra.errors import accepted, accepts, alternatives, invalid, user_path

SAME_RESULTS = "same results"
"""Mark of a key or a group that a resumed run may change: it changes no result except by rounding, or is made to be changed, as are
the partition (delays), ``dp`` (statistics of shares) and ``checkpoint.every`` (drains), which change later results.

A key without this mark changes results: ``Annotated[int, "same results"]``. Paths have it; the length of a run doesn't count.
"""
PATH = "path"
"""Mark of a key whose text is a path, in which ``~`` is the home folder."""


@dataclass
class Key:
    """A parameter or field.

    Attributes:
        hint: Its type.
        default: Its default; ``...`` if there is none.
    """

    hint: Any
    default: Any

    @property
    def same_results(self) -> bool:
        """Whether a resumed run may change it."""
        return self._marked(SAME_RESULTS)

    def _marked(self, mark: str) -> bool:
        return any(mark in getattr(hint, "__metadata__", ()) for hint in (self.hint, *get_args(self.hint)))

    @property
    def is_text(self) -> bool:
        """Whether it accepts any text."""
        return bool(accepted(self.hint)) and accepts(self.hint, "any text")

    @property
    def is_texts(self) -> bool:
        """Whether it accepts any list of texts."""
        return bool(accepted(self.hint)) and accepts(self.hint, ["any text"])

    @property
    def expected(self) -> str:
        """Description of the accepted values."""
        return alternatives(dict.fromkeys(accepted(self.hint) or ["a value"]))

    def read(self, name: str, value: Any) -> Any:
        """Return a value, a path with the home folder for ``~``. ``name`` is the full name of the key, for the message.

        A number or truth value is no text: YAML's ``1_0`` is 10, so the text that was written is unknown.

        Raises:
            ConfigError: If the value is not accepted.
        """
        if value is ... or value == "???":
            raise invalid(name, self.expected, "nothing")
        if accepts(self.hint, value):
            return str(user_path(name, value)) if isinstance(value, str) and self._marked(PATH) else value
        unquoted = isinstance(value, int | float | date) and self.is_text
        raise invalid(name, self.expected + unquoted * ' in quotes ("...")', "null" if value is None else value)


def fields_of(schema: Any) -> dict[str, Key]:
    """Return the fields of a dataclass of the schema."""
    hints = get_type_hints(schema, include_extras=True)
    defaults = {entry.name: ... if entry.default is MISSING else entry.default for entry in fields(schema)}
    return {name: Key(hints[name], default) for name, default in defaults.items()}


def is_shipped(target: str) -> bool:
    """Return whether a target is one of petra's."""
    return target.startswith("petra.")


@cache
def signature(target: str) -> dict[str, Key]:
    """Return the parameters of a function or class in petra, in their order.

    Raises:
        ConfigError: If petra has no such function or class.
    """
    module, *nodes = definition(target)
    names, found = Names(module), dict[str, Key]()
    for each in nodes:
        exec(f"def parameters({_parameters(each)}): ...", {}, names)
        for name, entry in inspected(names.pop("parameters")).parameters.items():
            default = ... if entry.default is Parameter.empty else entry.default
            default = str(default) if isinstance(default, str) else list(default) if isinstance(default, tuple) else default
            found[name] = Key(names.hint(entry.annotation), default)
    found.pop("self", None)
    return found


@cache
def definition(target: str) -> tuple[Any, ...]:
    """Return the module of a function or class in petra, the statements of its base classes there, and its own.

    Raises:
        ConfigError: If petra has none of this name.
    """
    module, _, name = target.rpartition(".")
    for node in _statements(module):
        if getattr(node, "name", None) == name:
            bases = {*map(ast.unparse, getattr(node, "bases", ()))}
            return module, *(part for part in _statements(module) if getattr(part, "name", None) in bases), node
        if isinstance(node, ast.ImportFrom) and name in (alias.name for alias in node.names):
            return definition(f"{node.module}.{name}")
    raise invalid("_target_", "a function or class of petra", target)


class Names(dict[str, Any]):
    """The constants, enumerations and standard types of a module of petra by name, evaluated when they are looked up."""

    def __init__(self, module: str) -> None:
        super().__init__(Path=Annotated[str, SAME_RESULTS, PATH])
        self.module = module

    def __missing__(self, name: str) -> Any:
        for node in _statements(self.module):
            match node:
                case ast.ImportFrom(module=str(module), names=names) if name in (alias.name for alias in names):
                    standard = module.partition(".")[0] in sys.stdlib_module_names
                    return getattr(import_module(module), name) if standard else Names(module)[name]
                case ast.Assign(targets=[ast.Name(found)]) | ast.ClassDef(name=found, bases=[ast.Name("StrEnum")]) if found == name:
                    exec(ast.unparse(node), {}, self)
                    return self[name]
        raise KeyError(name)

    def hint(self, annotation: Any) -> Any:
        """Return the type that an annotation names; Any for other types, which are checked by what the key configures."""
        try:
            return Any if annotation is Parameter.empty else eval(annotation, {}, self)
        except (NameError, TypeError):
            return Any


@cache
def _statements(module: str) -> list[ast.stmt]:
    path = Path(petra.__path__[0], *module.split(".")[1:])
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(path.read_text(encoding="utf-8")).body if is_shipped(f"{module}.") and path.is_file() else []


def _parameters(node: Any) -> str:
    """Return the parameters of a function or constructor, or the fields of a dataclass, as source."""
    constructor = next((part for part in node.body if getattr(part, "name", None) == "__init__"), node)
    if isinstance(constructor, ast.FunctionDef):
        return ast.unparse(constructor.args)
    values = [ast.unparse(part) for part in node.body if isinstance(part, ast.AnnAssign)]
    return ", ".join(["*", *values] if values else [])
