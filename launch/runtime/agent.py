"""torchrun's agent in this process: forwards signals to the workers and exits with their status."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from threading import Event, Thread
from types import FrameType

from petra.errors import ConfigError

from .reporting import CANCELLED, STOPPED
from .signals import exit_at_once, stop_signals

LOOPBACK = "127.0.0.1"


def run_agent(flags: Sequence[str], module: str, arguments: Sequence[str]) -> None:
    """Start ``python -m module arguments`` in the processes of this machine through torchrun, and wait for them.

    If a process fails, exit with its status, or with 128 + the number of the signal that ended it. The failed process has
    printed its own error. If a signal stops the processes before they train, exit with the status of a stopped run.

    Signals that ask a run to stop are forwarded each time they arrive, and the processes may take as long as they need. torchrun
    itself would kill them after 30 seconds, hide their status, and ignore SIGUSR1.

    Args:
        flags: Arguments of torchrun.
        module: Module that each process runs.
        arguments: Arguments of the module.

    Raises:
        ConfigError: If processes on this machine can't connect to each other.
    """
    require_loopback()
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    os.environ.setdefault("OMP_NUM_THREADS", "1")
    started = Event()
    for number in stop_signals():
        signal.signal(number, partial(_forward, started))
    # Processes inherit the mask, so that none is interrupted before it can handle Ctrl-C (launch.runtime.terminal.command). Another
    # thread takes the signal for this process, and the handler still runs in this thread.
    Thread(target=_watch, args=(started,), daemon=True).start()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        torchrun(["--signals-to-handle", "SIGQUIT", *flags, "-m", module, *arguments])
    except ChildFailedError as error:
        for number in stop_signals():  # nothing may hide the status any more; Slurm ends the agents of other nodes at this point
            signal.signal(number, signal.SIG_IGN)
        rank, failure = error.get_first_failure()
        code = failure.exitcode
        if -code in stop_signals() and -code != signal.SIGINT:  # a process that trains handles them
            print(f"process {rank} was stopped before training, by {failure.signal_name()}", file=sys.stderr, flush=True)
            sys.exit(STOPPED)
        cause = f"signal {failure.signal_name()}" if code < 0 else f"status {code}"
        if code != CANCELLED:
            print(f"process {rank} failed first, with {cause}", file=sys.stderr, flush=True)
        sys.exit(code if code > 0 else 128 - code)
    except SignalException as stopped:
        sys.exit(128 + stopped.sigval)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def run_on_this_machine(processes: int, module: str, arguments: Sequence[str]) -> None:
    """Start a number of processes that talk to no other machine, as :func:`run_agent` does."""
    run_agent(["--standalone", "--nproc-per-node", str(processes)], module, arguments)


def require_loopback() -> None:
    """Check that a process can connect to another one on this machine. torchrun would try for minutes.

    Raises:
        ConfigError: If it can't.
    """
    try:
        with socket.create_server((LOOPBACK, 0)) as server:
            socket.create_connection(server.getsockname(), timeout=5).close()
    except OSError as error:
        raise ConfigError(
            f"network: processes on this machine can't connect to each other at {LOOPBACK} ({error.strerror or error}); the "
            "loopback interface must be up (ip link set lo up)"
        ) from error


def children() -> list[int]:
    """Return the ids of the running processes that any thread of this process has started."""
    return [int(pid) for task in Path("/proc/self/task").iterdir() for pid in (task / "children").read_text().split()]


def _watch(started: Event) -> None:
    """Set ``started`` when this process has started another one. Never return."""
    while not children():
        time.sleep(0.05)
    started.set()
    Event().wait()


def _forward(started: Event, number: int, frame: FrameType | None) -> None:
    """Forward a signal. If the processes have ended, this one is about to exit with their status, and continues."""
    processes = children()
    for pid in processes:
        with suppress(ProcessLookupError):
            os.kill(pid, number)
    if not processes and not started.is_set():
        exit_at_once(number, frame)  # torchrun would print a traceback of SystemExit
