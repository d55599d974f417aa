"""Errors of a run over several processes: reported once, by the rank where they began, with a defined exit status."""

from __future__ import annotations

import errno
import logging
import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from threading import Thread
from typing import NoReturn

from petra.errors import CommunicationError, Interrupted, NumericsError, PetraError

from .rank import Process

FAILED, STOPPED, CANCELLED = 2, 75, 130
"""Exit statuses: an error that the user can act on, a stopped run that can be resumed (EX_TEMPFAIL in sysexits.h), Ctrl-C."""
ORIGIN_WAIT = 30.0
"""Seconds that a rank waits for the rank where the error began. torchrun stops all other processes as soon as one has failed."""
REPORT_WAIT = 1.0
"""Seconds that a rank which lost a neighbour waits for the others to report their own error first."""
_LIMITS = (errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE)
"""Errors of the operating system that a user can act on, wherever they occur."""


@contextmanager
def report_errors(process: Process) -> Iterator[None]:
    """Exit with a status if the body raises an error that the user can act on. Only one rank prints the error, as one line.

    The exit status is :data:`FAILED`, :data:`STOPPED` for a run that was asked to stop, or :data:`CANCELLED` for Ctrl-C before
    training. Unexpected exceptions keep their traceback, which one rank prints.
    """
    show_warnings()
    try:
        yield
    except Interrupted as stopped:
        if process.first:
            print(stopped, file=sys.stderr, flush=True)
        sys.exit(STOPPED)
    except CommunicationError as error:
        _exit_after_lost_connection(str(error))
    except PetraError as error:
        began_here = error.origin if isinstance(error, NumericsError) else process.first
        _exit_with_error(str(error), wait=0 if began_here else ORIGIN_WAIT)
    except KeyboardInterrupt:
        sys.exit(CANCELLED)
    except Exception as error:
        from petra.distributed import is_communication_error

        where = getattr(error, "__notes__", ["before training"])[0]
        if is_out_of_memory(error):
            _exit_with_error(f"out of memory {where}: {first_sentence(error)}")
        if is_communication_error(error):
            _exit_after_lost_connection(f"communication between processes, {where}: {first_sentence(error)}")
        if isinstance(error, OSError) and error.errno in _LIMITS:
            _exit_with_error(f"{error.strerror} {where}" + (f": {error.filename}" if error.filename else ""))
        if claim_error_report():
            raise
        sys.exit(1)


def show_warnings() -> None:
    """Print the warnings of petra's loggers to stderr, one line each."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("warning: %(message)s"))
    logging.getLogger("petra").handlers[:] = [handler]


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


def is_out_of_memory(error: Exception) -> bool:
    """Return whether the device or the host ran out of memory. torch has no error class for the host."""
    import torch

    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "DefaultCPUAllocator: " in str(error)


def first_sentence(error: Exception) -> str:
    """Return the first sentence of a torch error, without the source line at its start."""
    text = (str(error) or "allocation failed").splitlines()[0]
    text = re.sub(r"^\[[^\]]*\] (err == 0\. DefaultCPUAllocator: )?", "", text)
    return re.sub(r"(?<!out of memory)\. .*", "", text)


def claim_error_report(*, this_machine: bool = False) -> bool:
    """Claim the right to report an error. Return whether no other rank has claimed it before.

    Ranks that can't be reached within :data:`REPORT_WAIT` are ignored.

    Args:
        this_machine: Consider only the ranks on this machine, if torchrun has started them.
    """
    first_here = _claim_on_this_machine()
    if first_here is False or (first_here and this_machine):
        return first_here
    claims = [True]

    def claim() -> None:
        from petra.torch_private import default_store

        with suppress(RuntimeError):
            store = default_store()
            claims[0] = store is None or store.add("reported", 1) == 1

    if _in_process_group():
        claiming = Thread(target=claim, daemon=True)  # a store on a lost host doesn't answer for minutes
        claiming.start()
        claiming.join(REPORT_WAIT)
    return claims[0]


def _in_process_group() -> bool:
    """Return whether this process has joined a process group. An error before that is reported without importing torch."""
    distributed = sys.modules.get("torch.distributed")
    return distributed is not None and distributed.is_initialized()


def _claim_on_this_machine() -> bool | None:
    """Claim the report through the folder that torchrun makes for the error files of one start. Return None without one."""
    if not (file := os.environ.get("TORCHELASTIC_ERROR_FILE")):
        return None
    try:
        Path(file).parents[1].joinpath("reported").touch(exist_ok=False)
    except FileExistsError:
        return False
    except OSError:
        return None
    return True


def _exit_with_error(message: str, *, wait: float = 0) -> NoReturn:
    """Report an error unless another rank has reported one, and exit.

    Args:
        message: Text of the error.
        wait: Seconds to wait first, so that the rank where the error began can report it.
    """
    time.sleep(wait)
    if claim_error_report():
        print(f"error: {message}", file=sys.stderr, flush=True)
    sys.exit(FAILED)


def _exit_after_lost_connection(message: str) -> NoReturn:
    """Report a failed communication, once on every machine, unless another rank has reported its own error. Then exit."""
    # torchrun sends SIGTERM to all ranks as soon as one has failed, but this rank may be the one that reports.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(REPORT_WAIT)
    if claim_error_report(this_machine=True):
        print(f"error: {message}; another process has died, hangs or can't be reached", file=sys.stderr, flush=True)
    if _in_process_group():
        sys.stdout.flush()
        os._exit(FAILED)  # at a normal exit, gloo would wait for the lost process for the whole timeout again
    sys.exit(FAILED)
