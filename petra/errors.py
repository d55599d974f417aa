"""Exceptions for errors that a user can correct, and helpers that build their messages.

A message names the configuration key, argument or file, then what was expected and what was got.
"""

from __future__ import annotations

from collections.abc import Iterable


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


def one_of(values: Iterable[str]) -> str:
    """Return the accepted values as text: ``auto, local or edge``."""
    *others, last = values
    return f"{', '.join(others)} or {last}" if others else last


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or the name of its type if the message is empty."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
