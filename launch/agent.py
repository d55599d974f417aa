"""torchrun's agent in this process, and its end told in a line."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main as torchrun


def run_agent(flags: Sequence[str], module: str, arguments: Sequence[str]) -> None:
    """Starts ``python -m module arguments`` in this machine's processes, as torchrun does with ``flags``, and waits for them.

    Ends this process with the status of the first one that fails, or 128 + the signal that ended it. What went wrong the failing
    process has told itself.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    try:
        torchrun([*flags, "-m", module, *arguments])
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        code = failure.exitcode
        told = f"signal {failure.signal_name()}" if code < 0 else f"status {code}"
        print(f"process {rank} failed first, with {told}", file=sys.stderr, flush=True)
        sys.exit(code if code > 0 else 128 - code)
    except SignalException as stopped:
        sys.exit(128 + stopped.sigval)
