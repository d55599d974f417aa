"""Microbatches on their way to a GPU, with fake CUDA events and pinned memory."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from threading import current_thread, main_thread

import pytest
import torch
from torch import Tensor

from petra.engine.options.staging import AHEAD, IN_FLIGHT, Staging

CPU = torch.device("cpu")


class Event:
    """A CUDA event of a GPU that finishes nothing before the host waits for it."""

    waited = recorded = 0

    def record(self) -> None:
        Event.recorded += 1

    def query(self) -> bool:
        return False

    def synchronize(self) -> None:
        Event.waited += 1


@pytest.fixture
def thread(monkeypatch: pytest.MonkeyPatch) -> ThreadPoolExecutor:
    Event.waited = Event.recorded = 0
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(Tensor, "pin_memory", lambda self: self)
    return ThreadPoolExecutor(1)


def test_microbatches_are_read_in_advance_by_another_thread_in_order(thread: ThreadPoolExecutor) -> None:
    read, in_main_thread = list[int](), list[bool]()

    def source(m: int) -> Tensor:
        read.append(m)
        in_main_thread.append(current_thread() is main_thread())
        return torch.full((2,), float(m))

    staged = Staging(source, CPU, range(3, 23), thread)
    for m in range(3, 23):
        assert torch.equal(staged(m), torch.full((2,), float(m)))
        thread.submit(int).result()  # the thread has done what it was given
        assert read == [*range(3, min(m + AHEAD + 1, 23))]
        assert Event.recorded - Event.waited <= IN_FLIGHT, "the host waits for a GPU that is far behind"
    assert Event.waited == 20 - IN_FLIGHT
    assert in_main_thread == [True, *[False] * 19]  # data workers are forked in the main thread


def test_two_readers_of_one_source_do_not_read_at_the_same_time(thread: ThreadPoolExecutor) -> None:
    """The second reader, that of refetched inputs, starts while the thread still reads for the first one."""
    reading, most = 0, 0

    def read(m: int) -> Tensor:
        nonlocal reading, most
        reading += 1
        most = max(most, reading)
        time.sleep(0.01)
        reading -= 1
        return torch.zeros(1)

    first, second = (Staging(read, CPU, range(8), thread) for _ in range(2))
    for m in range(8):
        first(m)
        if m >= 3:
            second(m - 3)
    assert most == 1
