"""Output and errors of all commands: tables, terminals without Unicode, closed pipes, Ctrl-C, errors in one line."""

from __future__ import annotations

import argparse
import atexit
import errno
import io
import os
import signal
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from getpass import getuser
from pathlib import Path
from typing import IO, NoReturn, ParamSpec

from petra.errors import ConfigError, PetraError, alternatives, invalid, user_path

from .reporting import FAILED, exit_at_once

P = ParamSpec("P")
_CLOSED = (errno.EPIPE, errno.EIO)
"""Errors of a pipe whose reader has ended, and of a terminal that was closed."""

_REFUSED = (errno.EACCES, errno.EPERM, errno.ENAMETOOLONG)
"""Errors that even a question whether a path exists may raise."""


def command(main: Callable[P, None]) -> Callable[P, None]:
    """Make a command out of a function: ``main`` runs with :func:`prepare_streams`, and its errors become one line and a status.

    Ctrl-C ends the process at once with status 130 unless ``main`` handles the signal itself.
    """

    @wraps(main)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        prepare_streams()
        name_user()
        before = signal.getsignal(signal.SIGINT)
        during = exit_at_once if before is signal.default_int_handler else before  # otherwise the parent process has decided
        signal.signal(signal.SIGINT, during)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # an agent starts its processes with the signal blocked
        try:
            main(*args, **kwargs)
        except PetraError as error:
            print(f"error: {error}", file=sys.stderr, flush=True)
            sys.exit(FAILED)
        except OSError as error:
            if error.filename is None or error.errno not in _REFUSED:
                raise
            print(f"error: {error.filename}: can't be read or written ({error.strerror})", file=sys.stderr, flush=True)
            sys.exit(FAILED)
        finally:
            signal.signal(signal.SIGINT, before)
            atexit.register(signal.signal, signal.SIGINT, during)  # a KeyboardInterrupt at exit would print a traceback

    return run


def parser_for(text: str | None, epilog: str | None = None) -> argparse.ArgumentParser:
    """Return a parser whose help is the docstring of a command without its markup. Abbreviated flags may be Hydra's.

    Its errors are one line, of a :class:`petra.errors.ConfigError`.
    """
    form, plain = argparse.RawDescriptionHelpFormatter, (text or "").replace("``", "").replace("::", ":")
    return _Parser(description=plain, formatter_class=form, epilog=epilog, allow_abbrev=False)


class _Parser(argparse.ArgumentParser):
    """Parser whose errors don't print the usage, and name what may be meant."""

    def error(self, message: str) -> NoReturn:
        unknown = message.removeprefix("unrecognized arguments: ").split()
        if message.startswith("unrecognized") and unknown[0].startswith("-"):
            from ..config.words import unknown_flag

            raise unknown_flag(unknown[0], [flag for action in self._actions for flag in action.option_strings])
        missing = [*message.removeprefix("the following arguments are required: ").split(", ")] if "are required" in message else []
        for action in self._actions:
            if action.choices and action.dest in missing:
                raise invalid("command line", alternatives(map(str, action.choices)), "nothing")
        raise ConfigError(f"command line: {message}")


def path_argument(text: str) -> Path:
    """Return an argument that is a path, with the home folder for ``~`` at its beginning (a type of arguments)."""
    return user_path("command line", text)


def table(header: Sequence[str], rows: Iterable[Sequence[str]], *, aligned: bool = False) -> str:
    """Return a Markdown table, which ends with a newline. Columns that are ``aligned`` line up in a terminal."""
    cells = [header, ["---"] * len(header), *rows]
    widths = [aligned * max(map(len, column)) for column in zip(*cells, strict=True)]
    return "".join("| " + " | ".join(map(str.ljust, line, widths)) + " |\n" for line in cells)


def name_user() -> None:
    """Give a user without a name, as in many containers, the number as name: torch and wandb end with an error without one."""
    try:
        getuser()
    except (KeyError, OSError):
        os.environ["LOGNAME"] = str(os.getuid())


def prepare_streams() -> None:
    """Make stdout and stderr accept any text, and survive a reader that has ended, a closed terminal, or a full disk."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:  # closed, so the next file that is opened would get this number
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    sys.stdout = _lasting(sys.stdout, sys.__stdout__, 1)
    sys.stderr = _lasting(sys.stderr, sys.__stderr__, 2)


def _lasting(stream: IO[str] | None, original: IO[str] | None, number: int) -> IO[str]:
    """Return the stream to use instead of ``stream``. A stream that a caller has replaced stays as it is."""
    if stream is None:
        return open(number, "w", encoding="utf-8", closefd=False)
    if stream is not original or not isinstance(stream, io.TextIOWrapper):
        return stream
    return _LastingText(stream.buffer, stream.encoding, "replace", line_buffering=stream.line_buffering or number == 2)


class _LastingText(io.TextIOWrapper):
    """Text stream that discards its output as soon as its file can't be written."""

    def write(self, text: str) -> int:
        try:
            return super().write(text)
        except OSError as error:
            self._discard(error)
            return len(text)

    def flush(self) -> None:
        try:
            super().flush()
        except OSError as error:
            self._discard(error)

    def _discard(self, error: OSError) -> None:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, self.fileno())
        os.close(null)
        if error.errno not in _CLOSED and self is not sys.stderr:
            print(f"warning: output can't be written ({error.strerror}); the rest is discarded", file=sys.stderr, flush=True)
