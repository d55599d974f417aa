"""torchrun's agent in this process, its end told in a line, and signals handed on to the processes that it has started."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main as torchrun

from launch.runtime.signals import SIGNALS


def run_agent(flags: Sequence[str], module: str, arguments: Sequence[str]) -> None:
    """Starts ``python -m module arguments`` in this machine's processes, as torchrun does with ``flags``, and waits for them.

    Ends this process with the status of the first one that fails, or 128 + the signal that ended it. What went wrong the failing
    process has told itself. Signals that ask a run to stop are handed on as often as they come, and the processes have all the
    time they need; torchrun itself would kill them after 30 seconds, hide their status, and not know SIGUSR1.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    for number in SIGNALS:
        signal.signal(number, _hand_on)
    try:
        torchrun(["--signals-to-handle", "SIGHUP,SIGQUIT", *flags, "-m", module, *arguments])
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        code = failure.exitcode
        told = f"signal {failure.signal_name()}" if code < 0 else f"status {code}"
        print(f"process {rank} failed first, with {told}", file=sys.stderr, flush=True)
        sys.exit(code if code > 0 else 128 - code)
    except SignalException as stopped:
        sys.exit(128 + stopped.sigval)


def children() -> list[int]:
    """The processes that this one has started and that still run, those of all its threads."""
    return [int(pid) for task in Path("/proc/self/task").iterdir() for pid in (task / "children").read_text().split()]


def _hand_on(number: int, frame: FrameType | None) -> None:
    processes = children()
    for pid in processes:
        with suppress(ProcessLookupError):
            os.kill(pid, number)
    if not processes:
        sys.exit(128 + number)
