"""Microbatches computed ahead of their use, in processes of their own."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from itertools import count
from threading import Thread

from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from petra.errors import DataError, first_line

AHEAD = 2
"""Microbatches under way in each worker."""


class Prefetcher:
    """Calls ``function`` of consecutive numbers before they are asked for; what it returns depends on the number alone.

    Any number may be asked for; one that doesn't follow the last starts anew from there. The workers are forked at the first call
    and end with the last number, with this object, or within seconds of their parent's end, however that came.

    Args:
        stop: the number after the last; None if there is no last.

    Raises:
        DataError: what ``function`` raised for this number; or a worker died.
    """

    def __init__(self, function: Callable[[int], Tensor], workers: int, stop: int | None = None) -> None:
        self._function, self._workers, self._stop = _Numbered(function), workers, stop
        self._next = -1
        self._results: Iterator[Tensor | str] = iter(())

    def __call__(self, m: int) -> Tensor:
        if m != self._next:
            self._start(m)
        try:
            found = next(self._results)
        except RuntimeError as error:
            if not str(error).startswith("DataLoader worker"):
                raise
            raise DataError(
                f"data.workers: a worker process died ({first_line(error)}); it may have run out of memory, or of shared "
                "memory (/dev/shm), which holds the microbatches that are ready: use fewer workers or allow more"
            ) from error
        self._next = m + 1
        if self._next == self._stop:
            self._results = iter(())
        if isinstance(found, str):
            raise DataError(found)
        return found

    def _start(self, m: int) -> None:
        loader = DataLoader(
            self._function,
            batch_size=None,
            sampler=count(m) if self._stop is None else range(m, self._stop),
            num_workers=self._workers,
            prefetch_factor=AHEAD,
            multiprocessing_context="fork",
            worker_init_fn=_deafen,
        )
        self._results = iter(loader)


def _deafen(worker: int) -> None:
    """Clusters and terminals signal all processes of a job, but a run that ends with a checkpoint needs its data until then."""
    for number in (signal.SIGUSR1, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    Thread(target=_obey_parent, daemon=True).start()


def _obey_parent() -> None:
    """At its end the parent terminates its workers."""
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != os.getppid():
        pass
    os._exit(0)


class _Numbered(Dataset[Tensor | str]):
    """Errors travel as their text: raised in a worker they would arrive wrapped in its traceback."""

    def __init__(self, function: Callable[[int], Tensor]) -> None:
        self.function = function

    def __getitem__(self, m: int) -> Tensor | str:
        try:
            return self.function(m)
        except DataError as error:
            return str(error)
