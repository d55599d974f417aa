"""Checks on the value of a single key. The schema declares them with the keys; checks on several keys are elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, is_dataclass
from math import inf, isfinite
from types import NoneType
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from petra.errors import alternatives, invalid

_KINDS = {
    int: ("an integer", "integers"),
    float: ("a number", "numbers"),
    bool: ("true or false", ""),
    str: ("a string", "strings"),
}
"""Names of a type of values, in the singular and in the plural."""


@dataclass(frozen=True)
class Check:
    """A condition on a value that isn't null.

    Attributes:
        holds: Whether a value is accepted.
        expected: Describes the accepted values. A function, since the registry of a name may grow.
    """

    holds: Callable[[Any], bool]
    expected: Callable[[], str]


class SameResults:
    """Type of :data:`SAME_RESULTS`."""


SAME_RESULTS = SameResults()
"""Marks a key or a group of keys that a resumed run may change: they don't change what is computed, apart from rounding.

A key without this mark changes results. The length of a run doesn't count.
"""


def integer(least: int, most: int | None = None) -> Check:
    """Accept integers from ``least`` to ``most``."""
    text = f"an integer >= {least}" if most is None else f"an integer from {least} to {most}"
    return Check(lambda value: least <= value <= (inf if most is None else most), lambda: text)


def number(*, least: float = -inf, above: float = -inf, below: float = inf, most: float = inf) -> Check:
    """Accept finite numbers within the given bounds."""
    bounds = {">=": least, ">": above, "<": below, "<=": most}
    text = "a number " + " and ".join(f"{sign} {bound}" for sign, bound in bounds.items() if isfinite(bound))
    return Check(lambda value: isfinite(value) and least <= value <= most and above < value < below, lambda: text)


def one_of(names: Collection[str]) -> Check:
    """Accept the given names."""
    return Check(lambda value: value in tuple(names), lambda: alternatives(names))


def satisfies(holds: Callable[[Any], bool], expected: str) -> Check:
    """Accept what ``holds`` accepts, described by ``expected``."""
    return Check(holds, lambda: expected)


def is_integer(value: Any) -> bool:
    """Return whether a value is an integer and not a boolean."""
    return isinstance(value, int) and not isinstance(value, bool)


def as_list(value: Any) -> list[Any]:
    """Return a list as it is, and any other value as the only element of a list."""
    return value if isinstance(value, list) else [value]


@dataclass(frozen=True)
class Key:
    """Type, check and marks of one key of the schema."""

    kind: Any
    check: Check | None = None
    same_results: bool = False

    @property
    def optional(self) -> bool:
        """Whether the key may be null."""
        return NoneType in get_args(self.kind)

    @property
    def expected(self) -> str:
        """Description of the accepted values."""
        if self.check is not None:
            text = self.check.expected()
            return f"null{',' if ' or ' in text else ' or'} {text}" if self.optional else text
        (kind,) = (k for k in (get_args(self.kind) if self.optional else (self.kind,)) if k is not NoneType)
        if get_origin(kind) is list:
            text = f"a list of {_KINDS[get_args(kind)[0]][1]}"
        else:
            text = _KINDS[kind][0] if kind in _KINDS else "a value"
        return f"null or {text}" if self.optional else text

    def accepts(self, value: Any) -> bool:
        """Return whether a value of the right type is accepted.

        Includes the types of list elements, which OmegaConf doesn't check if they are lists or null.
        """
        if value is None and self.optional:
            return True
        lists = [kind for kind in (self.kind, *get_args(self.kind)) if get_origin(kind) is list]
        if lists and not all(type(element) is get_args(lists[0])[0] for element in value):
            return False
        return self.check is None or self.check.holds(value)


def schema_keys(schema: Any, prefix: str = "", *, same_results: bool = False) -> dict[str, Key]:
    """Return all keys of a schema by their full names, groups included. Keys of a group have its mark :data:`SAME_RESULTS`, too."""
    found: dict[str, Key] = {}
    for name, hint in get_type_hints(schema, include_extras=True).items():
        kind, *marks = (hint.__origin__, *hint.__metadata__) if get_origin(hint) is Annotated else (hint,)
        known = Key(kind, next((mark for mark in marks if isinstance(mark, Check)), None), same_results or SAME_RESULTS in marks)
        found[prefix + name] = known
        if is_dataclass(kind):
            found |= schema_keys(kind, f"{prefix}{name}.", same_results=known.same_results)
    return found


def require_valid(config: Any) -> None:
    """Check the value of each key of a configuration.

    Raises:
        ConfigError: If a value is not accepted.
    """
    for name, entry in schema_keys(type(config)).items():
        value = config
        for part in name.split("."):
            value = getattr(value, part)
        if not is_dataclass(value) and not entry.accepts(value):
            raise invalid(name, entry.expected, value)
