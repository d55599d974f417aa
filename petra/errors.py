"""Exceptions for errors that a user can correct, and helpers that build their messages.

A message names the configuration key, argument or file, then what was expected and what was got.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from enum import StrEnum
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints


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
    """

    def __init__(self, clock: int, *, saved: bool) -> None:
        rest = "checkpoint written, resume=auto continues from it" if saved else "no checkpoint written because checkpoint.keep=0"
        super().__init__(f"stopped on request after microbatch {clock}, {rest}")
        self.clock = clock


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


def alternatives(values: Iterable[str]) -> str:
    """Return the accepted values as text: ``auto, local or edge``."""
    *others, last = values
    return f"{', '.join(others)} or {last}" if others else last


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or the name of its type if the message is empty."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def check_types(settings: Any, prefix: str = "") -> None:
    """Check the fields of a frozen dataclass that are booleans, numbers, texts or names, and convert names to their enumerations.

    Python checks no types, so a wrong name could select a default. Fields of other types are left alone. A whole number is
    accepted as a number, and a truth value only as one.

    Args:
        settings: The dataclass, in its ``__post_init__``.
        prefix: What messages put before the name of a field, such as ``method.``.

    Raises:
        ConfigError: If a value has another type, or is not one of the names.
    """
    hints = get_type_hints(type(settings))
    for field in fields(settings):
        hint, value = hints[field.name], getattr(settings, field.name)
        kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
        texts = [text for kind in kinds for text in _accepted(kind)]
        if all(_accepted(kind) for kind in kinds):
            texts.sort(key=lambda text: text != "null")
            got = repr(value) if isinstance(value, str) and not any(_has_names(kind) for kind in kinds) else value
            require(any(_fits(kind, value) for kind in kinds), f"{prefix}{field.name}", alternatives(texts), got)
            for kind in kinds:
                if isinstance(kind, type) and issubclass(kind, StrEnum):
                    object.__setattr__(settings, field.name, kind(value))


def is_integer(value: object) -> bool:
    """Return whether a value is a whole number, and no truth value."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def _has_names(kind: Any) -> bool:
    return get_origin(kind) is Literal or (isinstance(kind, type) and issubclass(kind, str))


def _accepted(kind: Any) -> tuple[str, ...]:
    """Return the texts of what a type accepts; none if it is not checked."""
    if get_origin(kind) is Literal:
        return get_args(kind)
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        return tuple(kind)
    known = {bool: ("true", "false"), int: ("an integer",), float: ("a number",), str: ("a text",), NoneType: ("null",)}
    return known.get(kind, ())


def _fits(kind: Any, value: object) -> bool:
    if _has_names(kind):
        return isinstance(value, str) and (kind is str or value in _accepted(kind))
    if kind is float:
        return isinstance(value, Real) and not isinstance(value, bool)
    return is_integer(value) if kind is int else isinstance(value, kind)
