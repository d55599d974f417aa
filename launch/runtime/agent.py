"""How the processes of a run start and stop: torchrun's agent in this process, and the signals that ask a run to stop.

A run that is asked to stop drains the pipeline, writes a checkpoint and exits.
"""

from __future__ import annotations

import ctypes
import logging
import os
import resource
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event, Thread
from types import FrameType

from petra.errors import Interrupted

from .machine import LOOPBACK, limit_threads
from .rank import Process
from .reporting import CANCELLED, STOPPED, exit_at_once, report_errors

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT)
"""Preemption by a cluster (SIGTERM, or SIGUSR1 as an early warning), the end of a terminal or of an ssh connection (SIGHUP), and
the first Ctrl-C. A second Ctrl-C ends the process."""
ONE_MACHINE = ("--standalone", "--local-addr", LOOPBACK)
"""Arguments of torchrun for one machine, whose name need not resolve."""


@contextmanager
def this_process() -> Iterator[Process]:
    """Yield this process of a run. On Linux, it ends when torchrun's agent does. Its errors are reported (:func:`report_errors`).

    Raises:
        ConfigError: If torchrun's environment variables are invalid.
    """
    process = Process.from_environment()
    if sys.platform == "linux" and "TORCHELASTIC_RUN_ID" in os.environ:
        # Otherwise, a process whose agent was killed by SIGKILL would train on, possibly beside the restarted job.
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
    limit_threads()
    with report_errors(process):
        yield process


def stop_signals() -> list[signal.Signals]:
    """Return :data:`SIGNALS`, without SIGHUP if nohup has made this process ignore it."""
    return [number for number in SIGNALS if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN]


def stop_before_start() -> None:
    """Let the signals that stop a run end this process with the run's status until the run handles them itself."""
    for number in stop_signals():
        if number != signal.SIGINT:  # see launch.runtime.terminal.command
            signal.signal(number, exit_at_once)


class StopRequest:
    """Whether this process has been asked to stop. Call it to find out."""

    def __init__(self) -> None:
        self.received = False

    def __call__(self) -> bool:
        return self.received

    @contextmanager
    def handle_signals(self) -> Iterator[None]:
        """Record :data:`SIGNALS` as a request to stop while the context is active. Restore the earlier handlers afterwards.

        A run that stops on request ignores further signals, except for Ctrl-C, until its process has ended: as soon as the
        processes of one machine have ended, Slurm sends SIGTERM to those of the others, which would hide their status.
        """
        before = {number: signal.signal(number, self._receive) for number in stop_signals()}
        try:
            yield
        except Interrupted:
            before = {number: h if number == signal.SIGINT else signal.SIG_IGN for number, h in before.items()}
            raise
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.received = True
        if number == signal.SIGINT:
            # The default action ends the process at once. A KeyboardInterrupt would first wait for a pending message.
            signal.signal(signal.SIGINT, signal.SIG_DFL)


def run_agent(flags: Sequence[str], name: str, arguments: Sequence[str]) -> None:
    """Start the command ``petra name arguments`` in the processes of this machine through torchrun, and wait for them.

    If a process fails, exit with its status, or with 128 + the number of the signal that ended it. The failed process has
    printed its own error. If a signal stops the processes before they train, exit with the status of a stopped run.

    Signals that ask a run to stop are forwarded each time they arrive, and the processes may take as long as they need. torchrun
    itself would kill them after 30 seconds, hide their status, and ignore SIGUSR1.

    Args:
        flags: Arguments of torchrun.
        name: Name of the command that each process runs.
        arguments: Arguments of the command.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # The processes, or the lines below, say how they ended.
    logging.getLogger("torch.distributed.elastic.multiprocessing.api").addFilter(lambda record: "exitcode" not in str(record.msg))
    for number in stop_signals():
        signal.signal(number, _forward)
    # Processes inherit the mask, so that none is interrupted before it can handle Ctrl-C (launch.runtime.terminal.command). Another
    # thread takes the signal for this process, and the handler still runs in this thread.
    Thread(target=Event().wait, daemon=True).start()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        torchrun(["--signals-to-handle", "SIGQUIT", *flags, "-m", "petra", name, *arguments])
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


def children() -> list[int]:
    """Return the ids of the running processes that any thread of this process has started."""
    found: list[int] = []
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # the thread has ended
            found += map(int, (task / "children").read_text().split())
    return found


def _forward(number: int, frame: FrameType | None) -> None:
    """Forward a signal. If the processes have ended, this one is about to exit with their status, and continues."""
    processes = children()
    for pid in processes:
        with suppress(ProcessLookupError):
            os.kill(pid, number)
    if not processes and resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss == 0:  # none has been started
        exit_at_once(number, frame)  # torchrun would print a traceback of SystemExit
