"""Microbatches on their way from the data source to a GPU."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from threading import Lock

import torch
from torch import Tensor

AHEAD = 2
"""Microbatches that are read and copied to pinned memory before they are needed."""

reading = Lock()
"""Owned by the thread that reads, so a data source is never read by two threads at once."""


@cache
def _thread() -> ThreadPoolExecutor:
    """Return the staging thread. There is only one, so microbatches are read in the order in which they are asked for."""
    return ThreadPoolExecutor(1, "staging")


class Staging:
    """Copies tensors of consecutive microbatches to a GPU. A thread reads them and copies them to pinned memory in advance.

    The launching thread only starts the copy to the GPU, which runs in stream order. The amount of pinned memory is bounded because
    the host waits for a GPU that is far behind (:mod:`petra.engine.options.rounds`).

    Args:
        read: Reads a microbatch. Called in the launching thread for the first microbatch, so that data workers are forked there,
            and in the staging thread for the others.
        device: The GPU.
        microbatches: The microbatches, in the order in which they will be requested. No other is read.
        thread: Executor with one thread; by default one for all.
    """

    def __init__(
        self, read: Callable[[int], Tensor], device: torch.device, microbatches: range, thread: ThreadPoolExecutor | None = None
    ) -> None:
        self._read, self._device, self._thread = read, device, thread or _thread()
        self._left = iter(microbatches)
        self._pinned: deque[tuple[int | None, Future[Tensor]]] = deque()
        self._started = False

    def __call__(self, m: int) -> Tensor:
        """Return the tensor of microbatch ``m`` on the device."""
        if not self._started:
            self._started = True
            expected, pinned = next(self._left, None), self._pin(m)
            self._read_ahead()
        else:
            expected, future = self._pinned.popleft()
            self._read_ahead()
            pinned = future.result()
        assert expected == m, f"microbatch {expected} was expected, {m} was requested"
        return pinned.to(self._device, non_blocking=True)

    def _read_ahead(self) -> None:
        while len(self._pinned) < AHEAD and (m := next(self._left, None)) is not None:
            self._pinned.append((m, self._thread.submit(self._pin, m)))

    def _pin(self, m: int) -> Tensor:
        with reading:
            return self._read(m).pin_memory()
