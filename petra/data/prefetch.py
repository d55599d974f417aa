"""Worker processes that prepare microbatches in advance."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from itertools import count
from threading import Thread
from typing import Generic, TypeVar

import torch
from torch.utils.data import DataLoader, Dataset

from petra.errors import DataError, first_line

Result = TypeVar("Result")
PREFETCH_FACTOR = 2
"""Number of microbatches that each worker prepares in advance."""


class Prefetcher(Generic[Result]):
    """Calls ``function`` with consecutive numbers in worker processes, before the results are requested.

    The results must depend on the numbers only. Numbers may be requested in any order, but a number that doesn't follow the last
    one restarts the workers. Workers are forked at the first request. They exit after the last number, when this object is deleted,
    or within seconds after the parent process has ended.

    Args:
        function: Function of a number. Runs in a worker process.
        workers: Number of worker processes.
        stop: Number after the last one, or None for an endless sequence.
    """

    def __init__(self, function: Callable[[int], Result], workers: int, stop: int | None = None) -> None:
        self._function, self._workers, self._stop = _Numbered(function), workers, stop
        self._next = -1
        self._results: Iterator[Result | str] = iter(())

    def __call__(self, m: int) -> Result:
        """Return the result for number ``m``.

        Raises:
            DataError: If ``function`` raised it for this number, or if a worker died.
        """
        if m != self._next:
            self._start(m)
        try:
            result = next(self._results)
        except RuntimeError as error:
            if not str(error).startswith("DataLoader worker"):
                raise
            raise DataError(
                f"data.workers: a worker process died ({first_line(error)}), possibly because memory or shared memory (/dev/shm) "
                "for the prepared microbatches was exhausted; use fewer workers or provide more memory"
            ) from error
        self._next = m + 1
        if self._next == self._stop:
            self._results = iter(())
        if isinstance(result, str):
            raise DataError(result)
        return result

    def _start(self, m: int) -> None:
        loader = DataLoader(
            self._function,
            batch_size=None,
            sampler=count(m) if self._stop is None else range(m, self._stop),
            num_workers=self._workers,
            prefetch_factor=PREFETCH_FACTOR,
            multiprocessing_context="fork",
            worker_init_fn=_ignore_signals,
            generator=torch.Generator(),  # so that the loader draws nothing from the global generator
        )
        self._results = iter(loader)


def _ignore_signals(worker: int) -> None:
    """Ignore signals from anyone but the parent.

    Clusters and terminals send signals to all processes of a job, but the run needs its workers until it has written a checkpoint.
    """
    for number in (signal.SIGUSR1, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    Thread(target=_exit_on_sigterm_of_parent, daemon=True).start()


def _exit_on_sigterm_of_parent() -> None:
    """Wait for the SIGTERM that the parent sends when it ends, and exit."""
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != os.getppid():
        pass
    os._exit(0)


class _Numbered(Dataset[Result | str]):
    """Data set for ``DataLoader``. Returns the text of a DataError, because the loader would add a traceback to an exception."""

    def __init__(self, function: Callable[[int], Result]) -> None:
        self.function = function

    def __getitem__(self, m: int) -> Result | str:
        try:
            return self.function(m)
        except DataError as error:
            return str(error)
