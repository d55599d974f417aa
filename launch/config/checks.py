"""The keys of a schema, and the checks of their values. Checks on several keys are elsewhere."""

from __future__ import annotations

from dataclasses import dataclass, fields, is_dataclass
from types import NoneType
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from petra.errors import SAME_RESULTS, Check, invalid

_KINDS = {
    int: ("an integer", "integers"),
    float: ("a number", "numbers"),
    bool: ("true or false", ""),
    str: ("a string", "strings"),
}
"""Names of a type of values, in the singular and in the plural."""


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
        return self.kind is Any or NoneType in get_args(self.kind)

    @property
    def expected(self) -> str:
        """Description of the accepted values."""
        optional = NoneType in get_args(self.kind)
        if self.check is not None:
            return self.check.text(optional=optional)
        (kind,) = (k for k in (get_args(self.kind) if optional else (self.kind,)) if k is not NoneType)
        if get_origin(kind) is dict:
            text = "a mapping"
        elif get_origin(kind) is list:
            text = f"a list of {_KINDS[get_args(kind)[0]][1]}"
        else:
            text = _KINDS[kind][0] if kind in _KINDS else "a value"
        return f"null or {text}" if optional else text

    def accepts(self, value: Any) -> bool:
        """Return whether a value of the right type is accepted.

        Includes the types of list elements, which OmegaConf doesn't check if they are lists or null.
        """
        if value is None and NoneType in get_args(self.kind):
            return True
        lists = [kind for kind in (self.kind, *get_args(self.kind)) if get_origin(kind) is list]
        if lists and not all(type(element) is get_args(lists[0])[0] for element in value):
            return False
        return self.check is None or self.check.holds(value)


def schema_keys(schema: Any, prefix: str = "", *, same_results: bool = False) -> dict[str, Key]:
    """Return all keys of a schema by their full names, groups included. Keys of a group have its mark :data:`SAME_RESULTS`, too."""
    found: dict[str, Key] = {}
    hints = get_type_hints(schema, include_extras=True)
    for name, hint in ((entry.name, hints[entry.name]) for entry in fields(schema)):
        found[prefix + name] = known = key_of(hint, same_results=same_results)
        if is_dataclass(known.kind):
            found |= schema_keys(known.kind, f"{prefix}{name}.", same_results=known.same_results)
    return found


def key_of(hint: Any, *, same_results: bool = False) -> Key:
    """Return the key with a type hint, whose checks and marks ``Annotated`` adds."""
    kind, *marks = (hint.__origin__, *hint.__metadata__) if get_origin(hint) is Annotated else (hint,)
    return Key(kind, next((mark for mark in marks if isinstance(mark, Check)), None), same_results or SAME_RESULTS in marks)


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
