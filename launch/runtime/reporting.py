"""Errors of a run over several processes: reported once on each machine, by the rank where they began, with an exit status."""

from __future__ import annotations

import errno
import logging
import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from types import FrameType
from typing import NoReturn

from petra.errors import CommunicationError, Interrupted, NumericsError, PetraError, first_line, located

from .rank import Process

FAILED, STOPPED, CANCELLED = 2, 75, 130
"""Exit statuses: an error that the user can act on, a stopped run that can be resumed (EX_TEMPFAIL in sysexits.h), Ctrl-C."""
ORIGIN_WAIT = 30.0
"""Seconds that a rank waits for the rank where the error began. torchrun stops all other processes as soon as one has failed."""
REPORT_WAIT = 1.0
"""Seconds that a rank which lost a neighbour waits for the others to report their own error first."""
_LIMITS = (errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE)
"""Errors of the operating system that a user can act on, wherever they occur."""
TO_CONTINUE = "to continue: "
"""Beginning of the note of an error that ends a run which can be resumed."""
VERBOSE = "TORCHDYNAMO_VERBOSE"
"""Variable of torch.compile for whole tracebacks."""


def exit_at_once(number: int, frame: FrameType | None) -> None:
    """End this process, which does not train, with the status of Ctrl-C or of a stopped run (a signal handler).

    An exception could be swallowed or reported by whatever is being imported.
    """
    os._exit(CANCELLED if number == signal.SIGINT else STOPPED)


@contextmanager
def report_errors(process: Process) -> Iterator[None]:
    """Exit with a status if the body raises an error that the user can act on. One rank of each machine prints it, as one line.

    The exit status is :data:`FAILED`, :data:`STOPPED` for a run that was asked to stop, or :data:`CANCELLED` for Ctrl-C before
    training. Unexpected exceptions keep their traceback. Warnings of petra's loggers are printed to stderr, one line each.
    """
    warnings = logging.StreamHandler()
    warnings.setFormatter(logging.Formatter("warning: %(message)s"))
    logging.getLogger("petra").handlers[:] = [warnings]
    try:
        yield
    except Interrupted as stopped:
        if process.first:
            print(stopped, stopped.hint, sep="; ", file=sys.stderr, flush=True)
        sys.exit(STOPPED)
    except CommunicationError as error:
        _exit_after_lost_connection(str(error), hint_of(error))
    except PetraError as error:
        place = "" if isinstance(error, NumericsError) else located(error)  # other ranks have not raised an error of a stage
        began_here = error.origin if isinstance(error, NumericsError) else process.first or bool(place)
        _exit_with_error(f"{error}{f' ({place})' if place else ''}{hint_of(error)}", wait=0 if began_here else ORIGIN_WAIT)
    except KeyboardInterrupt:
        sys.exit(CANCELLED)
    except Exception as error:
        import torch

        from petra.distributed import is_communication_error
        from petra.torch_private import is_compiler_error

        notes = [note for note in getattr(error, "__notes__", ()) if not note.startswith(TO_CONTINUE)]
        where, hint = (notes or ["before training"])[0], hint_of(error)
        if isinstance(error, MemoryError | torch.OutOfMemoryError) or "DefaultCPUAllocator: " in str(error):  # torch has no class
            _exit_with_error(f"out of memory {where}: {first_sentence(error)}{hint}")
        if is_communication_error(error):
            _exit_after_lost_connection(f"communication between processes, {where}: {first_sentence(error)}", hint)
        if isinstance(error, OSError) and error.errno in _LIMITS:
            _exit_with_error(f"{error.strerror} {where}" + (f": {error.filename}" if error.filename else "") + hint)
        if is_compiler_error(error) and VERBOSE not in os.environ:
            got = f"{first_line(error)}; {VERBOSE}=1 prints all of it"
            _exit_with_error(f"trainer.compile: expected null, or blocks that torch.compile compiles, {where}; got {got}")
        if claim_error_report():
            raise
        sys.exit(1)


@contextmanager
def only_first_prints(process: Process) -> Iterator[None]:
    """Discard the output of the body on every rank but the first. If the body exits, let the first rank exit before the others."""
    if process.first:
        yield
        return
    try:
        with open(os.devnull, "w", encoding="utf-8") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
            yield
    except SystemExit:
        time.sleep(ORIGIN_WAIT)
        raise


def hint_of(error: BaseException) -> str:
    """Return how to continue after an error, for the end of its message; nothing if there is no checkpoint."""
    return next((f"; {note}" for note in getattr(error, "__notes__", ()) if note.startswith(TO_CONTINUE)), "")


def first_sentence(error: Exception) -> str:
    """Return the first sentence of a torch error, without the source line at its start."""
    text = (str(error) or "allocation failed").splitlines()[0]
    text = re.sub(r"^\[[^\]]*\] (err == 0\. DefaultCPUAllocator: )?", "", text)
    return re.sub(r"(?<!out of memory)\. .*", "", text)


def claim_error_report() -> bool:
    """Claim the right to report an error. Return whether no other rank on this machine has claimed it before.

    The claim is a file in the folder that torchrun makes for the error files of one start. Without torchrun, every rank reports.
    """
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        try:
            Path(file).parents[1].joinpath("reported").touch(exist_ok=False)
        except OSError as error:  # if the folder is gone, torchrun has ended
            return not isinstance(error, FileExistsError)
    return True


def _exit_with_error(message: str, *, wait: float = 0) -> NoReturn:
    """Report an error unless another rank of this machine has reported one, and exit.

    Args:
        message: Text of the error.
        wait: Seconds to wait first, so that the rank where the error began can report it.
    """
    time.sleep(wait)
    if claim_error_report():
        print(f"error: {message}", file=sys.stderr, flush=True)
    sys.exit(FAILED)


def _exit_after_lost_connection(message: str, hint: str = "") -> NoReturn:
    """Report a failed communication unless another rank of this machine has reported an error, and exit."""
    # torchrun sends SIGTERM to all ranks as soon as one has failed, but this rank may be the one that reports.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        _exit_with_error(f"{message}; another process has died, hangs or can't be reached{hint}", wait=REPORT_WAIT)
    finally:
        distributed = sys.modules.get("torch.distributed")  # an error before the processes connect doesn't import torch
        if distributed is not None and distributed.is_initialized():
            sys.stdout.flush()
            os._exit(FAILED)  # at a normal exit, gloo would wait for the lost process for the whole timeout again
