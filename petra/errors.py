"""Errors that a user can act on: each message names the key or file, what was found and what is accepted."""


class PetraError(Exception):
    """Base of every error that petra raises for bad input; its text is complete without a traceback."""


class ConfigError(PetraError):
    """A setting that can't work: a value out of range, or two settings that exclude each other."""


class DataError(PetraError):
    """A data file that is missing, damaged or of the wrong form."""


class ModelError(PetraError):
    """Blocks that don't fit each other, or two stages that disagree on the message between them."""


class ScheduleError(PetraError):
    """An order of forwards and backwards that can't be executed."""
