"""Signals that ask a run to stop: the run drains the pipeline, writes a checkpoint and exits."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from petra.errors import Interrupted

from .reporting import CANCELLED, STOPPED

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT)
"""Preemption by a cluster (SIGTERM, or SIGUSR1 as an early warning), the end of a terminal or of an ssh connection (SIGHUP), and
the first Ctrl-C. A second Ctrl-C ends the process."""
_PR_SET_PDEATHSIG = 1


def stop_with_agent() -> None:
    """Make the kernel send SIGTERM to this process when torchrun's agent ends, however it ends. Linux only.

    A process whose agent was killed by SIGKILL would otherwise continue to train, possibly beside the restarted job.
    """
    if sys.platform == "linux" and "TORCHELASTIC_RUN_ID" in os.environ:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def stop_signals() -> list[signal.Signals]:
    """Return :data:`SIGNALS`, without SIGHUP if nohup has made this process ignore it."""
    return [number for number in SIGNALS if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN]


def exit_at_once(number: int, frame: FrameType | None) -> None:
    """End this process, whose run has not started: with the status of a stopped run, or that of Ctrl-C (a signal handler)."""
    os._exit(CANCELLED if number == signal.SIGINT else STOPPED)


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
