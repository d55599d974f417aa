"""Worker processes that prepare microbatches in advance."""

from __future__ import annotations

import errno
import os
import resource
import signal
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from threading import Thread
from typing import Generic, TypeVar

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from petra.errors import DataError, first_line

Result = TypeVar("Result")
PREFETCH_FACTOR = 2
"""Number of microbatches that each worker prepares in advance."""
FILES_PER_WORKER = 4 + PREFETCH_FACTOR
"""Open files of this process for each worker: the pipes of its queue and of its end, and one for each prepared microbatch."""
_IGNORED = (signal.SIGUSR1, signal.SIGHUP, signal.SIGINT)
TIMEOUT = 600.0
"""Seconds to wait for a microbatch by default. The loader accepts 2^31 ms at most."""
_CHECK_INTERVAL = 5.0
"""Seconds between two looks of a worker at its parent."""
_LIMITS = "use fewer workers, or provide more memory, shared memory (/dev/shm, docker run --shm-size) or open files (ulimit -n)"


class Prefetcher(Generic[Result]):
    """Calls ``function`` with consecutive numbers in worker processes, before the results are requested.

    The results must depend on the numbers only. Numbers may be requested in any order, but a number that doesn't follow the last
    one restarts the workers. Workers are forked at the first request. They exit after the last number, when this object is deleted,
    or within seconds after the parent process has ended.

    Args:
        function: Function of a number. Runs in a worker process. It must not refer to this object: the workers would
            then end only when Python collects the circle, after 5 s for each of them.
        workers: Number of worker processes.
        stop: Number after the last one, or None for an endless sequence.
        timeout: Seconds to wait for a result.
    """

    def __init__(self, function: Callable[[int], Result], workers: int, stop: int | None = None, timeout: float = TIMEOUT) -> None:
        self._function, self._workers, self._stop, self._patience = _Numbered(function), workers, stop, timeout
        self._next = -1
        self._results: Iterator[Result | str] = iter(())

    def __call__(self, m: int) -> Result:
        """Return the result for number ``m``.

        Raises:
            DataError: If ``function`` raised it for this number, if a worker can't be started, if it died or did not answer in
                time, or if shared memory is full.
        """
        try:
            if m != self._next:
                self._results = self._started(m)
            self._next = -1  # after an error the workers restart, as the loader may have moved on
            result = next(self._results)
        except (OSError, RuntimeError) as error:
            reason = first_line(error)
            if isinstance(error, RuntimeError) and not reason.startswith(("DataLoader", "Too many open files")):
                raise  # from the function
            raise DataError(f"data.workers={self._workers}: can't prepare data ({reason}); {_LIMITS}") from error
        self._next = m + 1
        if self._next == self._stop:
            self._results = iter(())
        if isinstance(result, str):
            raise DataError(result)
        return result

    def _started(self, m: int) -> Iterator[Result | str]:
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if resource.RLIM_INFINITY != limit < len(os.listdir("/dev/fd")) + FILES_PER_WORKER * self._workers:
            # A loader whose start fails halfway prints a traceback when it is deleted.
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        warnings.filterwarnings("ignore", "This DataLoader will create")  # more workers than cores: data.workers says how many
        loader = DataLoader(
            self._function,
            batch_size=None,
            sampler=count(m) if self._stop is None else range(m, self._stop),
            num_workers=self._workers,
            prefetch_factor=PREFETCH_FACTOR,
            timeout=self._patience,
            multiprocessing_context="fork",
            worker_init_fn=partial(_ignore_signals, os.getpid()),
            generator=torch.Generator(),  # so that the loader draws nothing from the global generator
        )
        # A worker inherits the blocked signals, so none arrives before it has decided what to do with them.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {*_IGNORED, signal.SIGTERM})
        try:
            return iter(loader)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _ignore_signals(parent: int, worker: int) -> None:
    """Ignore signals from anyone but the parent, and exit with it.

    Clusters and terminals send signals to all processes of a job, but the run needs its workers until it has written a checkpoint.
    """
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, {signal.SIGTERM})
    Thread(target=_exit_with, args=(parent,), daemon=True).start()


def _exit_with(parent: int) -> None:
    """Exit at the SIGTERM that the parent sends when it ends, or within seconds after it was killed.

    The loader compares with the parent that a worker has once it has started, so it does not notice one that ended before.
    """
    while os.getppid() == parent:
        received = signal.sigtimedwait({signal.SIGTERM}, _CHECK_INTERVAL)
        if received is not None and received.si_pid == parent:
            break
    os._exit(0)


class _Numbered(Dataset[Result | str]):
    """Data set for ``DataLoader``.

    Returns the text of an error that says what can't be read, because the loader would add a traceback to an exception.
    """

    def __init__(self, function: Callable[[int], Result]) -> None:
        self.function = function

    def __getitem__(self, m: int) -> Result | str:
        try:
            result = self.function(m)
        except DataError as error:
            return str(error)
        except OSError as error:
            if error.filename is None or error.errno == errno.EMFILE:  # of the workers, not of a file
                raise
            return f"{error.filename}: can't be read ({error.strerror})"
        try:
            # The loader would do this in a thread of the worker, where an error would leave the run waiting for the result.
            for part in result if isinstance(result, tuple) else (result,):
                if isinstance(part, Tensor):
                    part.share_memory_()  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            return f"data.workers: no room in shared memory for a prepared microbatch ({first_line(error)}); {_LIMITS}"
        return result
