"""Errors that a user can act on: each message names the key or file, what was found and what is accepted."""


class PetraError(Exception):
    """Base of every error that petra raises for bad input; its text is complete without a traceback."""


class ConfigError(PetraError):
    """A setting that can't work: a value out of range, or two settings that exclude each other."""


class DataError(PetraError):
    """A data file that is missing, damaged or of the wrong form."""


class ModelError(PetraError):
    """Blocks that don't fit each other, or two stages that disagree on the message between them."""


class NumericsError(PetraError):
    """A loss or gradient that isn't finite.

    Attributes:
        origin: whether the stage that tells it computed it, instead of having received it; the origin's error is the one to show.
    """

    def __init__(self, message: str, *, origin: bool) -> None:
        super().__init__(message)
        self.origin = origin


class ScheduleError(PetraError):
    """An order of forwards and backwards that can't be executed."""


class CommunicationError(PetraError):
    """A message that didn't come or couldn't be sent: another process has died, hangs, or can't be reached."""


class Interrupted(PetraError):
    """A run that was asked to stop and has.

    Attributes:
        clock: microbatches that it has trained on.
    """

    def __init__(self, clock: int, *, saved: bool) -> None:
        rest = "checkpoint written, resume=auto goes on from there" if saved else "without a checkpoint, since checkpoint.keep=0"
        super().__init__(f"stopped as asked after microbatch {clock}, {rest}")
        self.clock = clock


def invalid(name: str, expected: str, got: object, kind: type[PetraError] = ConfigError) -> PetraError:
    """Return the error for a bad value, in the one form that all of petra uses: ``k: expected an integer >= 1, got 0``.

    Args:
        name: The key, argument, file or variable, as the user wrote it.
        expected: What is accepted, with its article: ``an integer >= 1``, ``auto, local or edge``.
        got: What was found.
        kind: Class of the error.
    """
    return kind(f"{name}: expected {expected}, got {got}")


def require(condition: bool, name: str, expected: str, got: object, kind: type[PetraError] = ConfigError) -> None:
    """Raise :func:`invalid` unless ``condition`` holds."""
    if not condition:
        raise invalid(name, expected, got, kind)


def first_line(error: BaseException) -> str:
    """Of what another library says about an error; the error's type where it says nothing."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
