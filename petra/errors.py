"""Exceptions for errors that a user can correct, and helpers that build their messages.

A message names the configuration key, argument or file, then what was expected and what was got.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import fields
from enum import EnumType
from itertools import chain
from math import isfinite
from numbers import Integral, Real
from operator import ge, gt, le, lt
from os.path import expanduser
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

Count = Annotated[int, ">= 1"]  # types of parameters with a range, as accepted() reads them
Positive = Annotated[float, "> 0"]
Share = Annotated[float, ">= 0 and < 1"]


class PetraError(Exception):
    """Base class of all errors that petra raises for invalid input. The message is complete without a traceback."""


class ConfigError(PetraError):
    """An invalid setting: a value out of range, or two settings that exclude each other."""


class DataError(PetraError):
    """A data file that is missing, damaged or in the wrong format."""


class ModelError(PetraError):
    """Blocks with incompatible inputs and outputs, or two stages that disagree on the message between them."""


class NumericsError(PetraError):
    """A loss or gradient that isn't finite.

    Attributes:
        origin: True if the stage that raises the error computed the value itself, False if it received the value from another
            stage. If several stages raise, only the error with ``origin=True`` needs to be reported.
    """

    def __init__(self, message: str, *, origin: bool) -> None:
        super().__init__(message)
        self.origin = origin


class ScheduleError(PetraError):
    """A schedule that can't be executed, for example because it deadlocks."""


class CommunicationError(PetraError):
    """A message could not be sent or received because another process has died, hangs or can't be reached."""


class Interrupted(PetraError):
    """A run that has stopped because a signal requested it.

    Attributes:
        clock: Number of microbatches that the run has trained on.
        saved: Whether a checkpoint has been written.
        hint: How to continue, for whoever sees the message.
    """

    def __init__(self, clock: int, *, saved: bool) -> None:
        rest = "checkpoint written" if saved else "no checkpoint written because checkpoint.keep=0"
        super().__init__(f"stopped on request after microbatch {clock}, {rest}")
        self.clock, self.saved, self.hint = clock, saved, ""


def invalid(name: str, expected: str, got: object, kind: type[PetraError] = ConfigError) -> PetraError:
    """Return the error for an invalid value, with a message such as ``k: expected an integer >= 1, got 0``.

    Args:
        name: The key, argument, file or variable, as the user wrote it.
        expected: What is accepted, with its article: ``an integer >= 1``, ``auto, local or edge``.
        got: What was found.
        kind: Class of the error.
    """
    value = str(got).lower() if isinstance(got, bool) else got  # as in a configuration
    return kind(f"{name}: expected {expected}, got {value}")


def require(condition: bool, name: str, expected: str, got: object, kind: type[PetraError] = ConfigError) -> None:
    """Raise the error of :func:`invalid` unless ``condition`` is true."""
    if not condition:
        raise invalid(name, expected, got, kind)


def user_path(name: str, path: str | Path) -> Path:
    """Return a path, with the home folder for ``~`` or ``~user`` at its beginning.

    Args:
        name: The key, argument or variable, for the message.

    Raises:
        ConfigError: If the path is empty, which would be the working directory, or the home folder is unknown.
    """
    require(str(path) != "", name, "a path, such as . for the working directory", "nothing")
    found = expanduser(path)
    expected = "a path without ~, since the home folder is unknown (./~ is a folder of this name)"
    require(not found.startswith("~"), name, expected, path)
    return Path(found)


def alternatives(values: Iterable[str]) -> str:
    """Return the accepted values as text: ``auto, local or edge``."""
    *others, last = values
    return f"{', '.join(others)} or {last}" if others else last


def located(error: BaseException) -> str:
    """Return the stage and microbatch in which an error began, such as ``in stage 2, microbatch 0, forward``, or nothing."""
    return next((note for note in getattr(error, "__notes__", []) if note.startswith("in stage ")), "")


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or the name of its type if the message is empty."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def check_types(settings: Any, prefix: str = "") -> None:
    """Check the fields of a frozen dataclass, and convert names to their enumerations and lists to tuples.

    Python checks no types, so a wrong name could select a default. See :func:`accepted` for the types that are checked. Fields of
    other types are left alone.

    Args:
        settings: The dataclass, in its ``__post_init__``.
        prefix: What messages put before the name of a field, such as ``method.``.

    Raises:
        ConfigError: If a value has another type, is out of bounds, or is not one of the names.
    """
    hints = get_type_hints(type(settings), include_extras=True)
    for field in fields(settings):
        hint, value = hints[field.name], getattr(settings, field.name)
        if expected := accepted(hint):
            require(accepts(hint, value), f"{prefix}{field.name}", alternatives(expected), value)
            object.__setattr__(settings, field.name, _converted(hint, value))


def is_integer(value: object) -> bool:
    """Return whether a value is a whole number, and no truth value."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def accepted(hint: Any, bounds: str = "", *, several: bool = False) -> list[str]:
    """Return descriptions of what a type accepts, null first; none if it is not checked.

    Checked are booleans, numbers, texts, names (``Literal`` and enumerations), null, and lists of these. A whole number is accepted
    as a number, and a truth value only as one. ``Annotated[float, ">= 0 and < 1"]`` bounds numbers.
    """
    kind, arguments, bounds, names = _parts(hint, bounds)
    if kind in (Union, UnionType):
        texts = [accepted(each, bounds, several=several) for each in arguments]
        return sorted(chain(*texts), key="null".__ne__) if all(texts) else []
    if kind in (list, tuple, Sequence):
        number = "" if len(arguments) == 1 or arguments[1] is ... else "two "
        inner = accepted(arguments[0], bounds, several=True)
        return [f"a list of {number}{alternatives(inner)}"] if inner else []
    if kind in (int, float):
        text = "integer" if kind is int else "number"
        return [f"{text}s {bounds}".strip() if several else f"a{'n' * (kind is int)} {text} {bounds}".strip()]
    if kind in (str, dict):
        text = "text" if kind is str else "mapping"
        return [f"{text}s" if several else f"a {text}"]
    return list(names or {NoneType: ("null",), bool: ("true", "false")}.get(kind, ()))


def accepts(hint: Any, value: Any, bounds: str = "") -> bool:
    """Return whether a type accepts a value. A type that is not checked accepts anything."""
    kind, arguments, bounds, names = _parts(hint, bounds)
    if kind in (Union, UnionType):
        return any(accepts(each, value, bounds) for each in arguments)
    if kind in (list, tuple, Sequence):
        fits = isinstance(value, list | tuple) and all(accepts(arguments[0], each, bounds) for each in value)
        return fits and (len(arguments) == 1 or arguments[1] is ... or len(value) == len(arguments))
    if names:
        return value in names
    if kind in (int, float):
        return isinstance(value, Integral if kind is int else Real) and not isinstance(value, bool) and within(value, bounds)
    return not isinstance(kind, type) or isinstance(value, kind)


def within(value: Any, bounds: str) -> bool:
    """Return whether a number is finite and within bounds such as ``>= 0 and < 1``. No bounds accept any number."""
    signs = {">": gt, ">=": ge, "<": lt, "<=": le}
    pairs = [bound.split() for bound in bounds.split(" and ") if bound]
    return not pairs or (isfinite(value) and all(signs[sign](value, float(limit)) for sign, limit in pairs))


def _parts(hint: Any, bounds: str) -> tuple[Any, tuple[Any, ...], str, tuple[Any, ...]]:
    """Return a type without parameters and ``Annotated``, its parameters, the bounds of its numbers, and the names it accepts."""
    if get_origin(hint) is Annotated:
        hint, bounds = hint.__origin__, next((mark for mark in hint.__metadata__ if mark[0] in "<>"), "")
    names = get_args(hint) if get_origin(hint) is Literal else tuple(hint) if isinstance(hint, EnumType) else ()
    return get_origin(hint) or hint, get_args(hint), bounds, names


def _converted(hint: Any, value: Any) -> Any:
    """Return names as members of their enumeration, and lists as tuples."""
    if isinstance(value, list | tuple):
        return tuple(_converted(hint, each) for each in value)
    kinds = [hint, *get_args(hint), *(inner for kind in get_args(hint) for inner in get_args(kind))]
    return next((kind(value) for kind in kinds if isinstance(kind, EnumType)), value) if isinstance(value, str) else value
