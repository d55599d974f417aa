"""A function that runs in a thread, step by step, never at the same time as its caller."""

from __future__ import annotations

from collections.abc import Callable
from threading import Semaphore, Thread
from typing import Any

import torch


class Stepwise:
    """Runs ``function(give)`` in a thread. It stops in each call of ``give(value)`` until :meth:`next` has returned the value.

    An iterator would turn the caller of ``function`` inside out, which a pipeline that calls back can't be.

    Args:
        function: The function.
        device: Current device of the thread.
    """

    def __init__(self, function: Callable[[Callable[[Any], None]], object], device: torch.device) -> None:
        self._function, self._device = function, device
        self._go, self._done = Semaphore(0), Semaphore(0)
        self._value: Any = None
        self._error: BaseException | None = None
        self._thread = Thread(target=self._run, daemon=True)
        self._thread.start()

    def next(self) -> Any:
        """Continue the function until it gives a value, and return it; None if it has ended. Raises its errors."""
        self._value = None
        self._go.release()
        self._done.acquire()
        if self._error is not None:
            raise self._error
        return self._value

    def finish(self) -> None:
        """Run the function to its end."""
        while self._thread.is_alive() and self.next() is not None:
            pass
        self._thread.join()

    def _run(self) -> None:
        self._go.acquire()
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        try:
            self._function(self._give)
        except BaseException as error:
            self._error = error
        self._done.release()

    def _give(self, value: Any) -> None:
        self._value = value
        self._done.release()
        self._go.acquire()
