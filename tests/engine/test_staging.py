"""Microbatches on their way to a GPU, with fake pinned memory."""

import time
from concurrent.futures import ThreadPoolExecutor
from threading import current_thread, main_thread

import pytest
import torch
from torch import Tensor

from petra.engine.options import rounds
from petra.engine.options.rounds import paced, unfinished
from petra.engine.options.staging import AHEAD, Staging
from petra.specs import Message
from petra.transport.port import WrappedPort

CPU = torch.device("cpu")


@pytest.fixture
def thread(monkeypatch: pytest.MonkeyPatch) -> ThreadPoolExecutor:
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


class Event:
    """A CUDA event of a GPU that finishes nothing before the host waits for it. Only the oldest one may be waited for."""

    waited = recorded = 0

    def record(self) -> None:
        self.number = Event.recorded
        Event.recorded += 1

    def synchronize(self) -> None:
        assert self.number == Event.waited
        Event.waited += 1

    def query(self) -> bool:
        return False


class Nowhere:
    """A port that discards messages."""

    def send(self, m: int, message: Message) -> None: ...


def test_the_host_waits_for_the_round_four_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    upstream, downstream = paced(Nowhere(), Nowhere())  # type: ignore[arg-type]
    for m in range(10):
        downstream.send(m, ())
        upstream.send(m - 3, ())
        assert Event.recorded - Event.waited <= rounds.AHEAD
    assert Event.waited == 20 - rounds.AHEAD
    assert unfinished(WrappedPort(upstream)) == [8, 5, 9, 6]
    assert unfinished(Nowhere()) == []  # type: ignore[arg-type]
