"""Exclusive use of a run's folder: a second job with the same ``run_dir`` is refused."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from petra.distributed import raise_on_all_ranks
from petra.training import locked

from ..config.schema import Config
from ..runtime.rank import Process


@contextmanager
def exclusive_folder(config: Config, process: Process) -> Iterator[None]:
    """Hold the lock on ``run_dir`` for the duration of the context. Every rank must enter it; rank 0 holds the lock.

    A run without ``run_dir`` has a folder of its own and needs no lock.

    Raises:
        PetraError: If another job uses the folder. Raised on every rank.
    """
    with ExitStack() as stack:
        with raise_on_all_ranks():
            if process.first and config.run_dir is not None and not stack.enter_context(locked(Path(config.run_dir))):
                print(
                    f"warning: the file system of {config.run_dir} has no locks, so a second job with this run_dir is not refused",
                    file=sys.stderr,
                    flush=True,
                )
        yield
