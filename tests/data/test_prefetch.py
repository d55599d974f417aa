"""Worker processes that prepare microbatches: correct results in order, and no process left behind."""

import gc
import multiprocessing
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch

from petra.data import TrainSource, load_dataset
from petra.data import prefetch as prefetch_module
from petra.data.prefetch import PREFETCH_FACTOR, Prefetcher, _ignore_signals
from petra.errors import DataError
from tests.support.processes import is_running


def doubled(m: int) -> torch.Tensor:
    return torch.tensor([2 * m, os.getpid()])


def test_numbers_come_in_order_from_other_processes(tmp_path: Path) -> None:
    """As many as the factor says are prepared in advance. Jumps and repetitions restart the workers."""

    def recorded(m: int) -> torch.Tensor:
        (tmp_path / str(m)).touch()
        return doubled(m)

    prefetch, ahead = Prefetcher(recorded, workers=2), {str(m) for m in range(1 + 2 * PREFETCH_FACTOR)}
    prefetch(0)
    assert eventually(lambda: {path.name for path in tmp_path.iterdir()} == ahead)
    for m in (1, 2, 100, 101, 7, 7):
        found, process = prefetch(m).tolist()
        assert found == 2 * m
        assert process != os.getpid()


def test_a_number_that_failed_once_is_prepared_again(tmp_path: Path) -> None:
    """And a file that can't be read is named, as without workers."""

    def flaky(m: int) -> torch.Tensor:
        if m in (2, 5) and not (tmp_path / str(m)).exists():
            (tmp_path / str(m)).touch()
            raise OSError(116, "Stale file handle", "/data/5.png") if m == 5 else ValueError("flaky")
        return torch.tensor(m)

    prefetch, found = Prefetcher(flaky, workers=1), []
    for m in (0, 1, 2, 2, 3, 4, 5, 5, 6):
        try:
            found.append(prefetch(m).item())
        except ValueError as error:
            found.append("flaky" in str(error))
        except DataError as error:
            found.append(str(error))
    assert found == [0, 1, True, 2, 3, 4, "/data/5.png: can't be read (Stale file handle)", 5, 6]


def eventually(condition: Callable[[], bool]) -> bool:
    """Return whether a condition becomes true within a minute."""
    deadline = time.monotonic() + 60
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


def test_workers_exit_after_the_last_number(monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0})  # torch warns of more workers than cores
    prefetch = Prefetcher(doubled, workers=2, stop=3, timeout=2e6)
    for _ in range(2):
        assert [prefetch(m)[0].item() for m in range(3)] == [0, 2, 4]
        assert not multiprocessing.active_children()
    assert not recwarn.list


def test_workers_end_with_their_source() -> None:
    """At once: no circle of references is left for the collector, which would take 5 s for each worker."""
    source = TrainSource(load_dataset("digits"), 4, seed=0, workers=1)
    source.inputs(0), source.refetch(0)
    assert len(multiprocessing.active_children()) == 2
    gc.disable()
    del source
    gc.enable()
    assert not multiprocessing.active_children()


def faulty(fault: Callable[[], object], m: int) -> torch.Tensor:
    if m == 1:
        fault()
    return torch.zeros(1000)


FAULTS = {
    r"data\.workers=1: can't prepare data \(DataLoader worker .*/dev/shm": lambda: os.kill(os.getpid(), signal.SIGKILL),
    r"data\.workers: no room in shared memory .*--shm-size": partial(
        resource.setrlimit, resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY)
    ),
    r"data\.workers=1: can't prepare data \(DataLoader timed out after 3 seconds": lambda: time.sleep(60),
    "division by zero": lambda: 1 // 0,
}


@pytest.mark.parametrize("message", FAULTS)
def test_a_worker_that_fails_is_reported(message: str) -> None:
    """A programming error keeps its type."""
    prefetch = Prefetcher(partial(faulty, FAULTS[message]), workers=1, timeout=3 if "timed out" in message else 60)
    with pytest.raises(DataError if "data" in message else ZeroDivisionError, match=message) as error:
        [prefetch(m) for m in (0, 1)]
    assert "data" not in message or len(str(error.value).splitlines()) == 1


def _waiting(parent: int, worker: int) -> None:
    """Start a worker; the second one's parent ends before the loader has noted it."""
    _ignore_signals(parent, worker)
    assert worker == 0 or eventually(lambda: os.getppid() != parent)


def _prefetching(sender: Connection, end: str) -> None:
    if end == "killed during the start":
        prefetch_module._ignore_signals = _waiting
    prefetch = Prefetcher(doubled, workers=2)
    prefetch(0)
    sender.send([child.pid for child in multiprocessing.active_children()])
    if end == "error":
        sys.exit(2)
    time.sleep(60)


def started(function: Callable[..., None], *arguments: str) -> tuple[multiprocessing.Process, object]:
    """Fork a process, and return it with the first object that it sends."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=function, args=(sender, *arguments))
    process.start()
    sender.close()
    assert receiver.poll(120)
    return process, receiver.recv()


@pytest.mark.parametrize("end", ["killed", "killed during the start", "error"])
def test_no_worker_outlives_its_parent(end: str) -> None:
    parent, workers = started(_prefetching, end)
    assert len(workers) == 2
    if end != "error":
        parent.kill()
    parent.join(timeout=60)
    assert parent.exitcode == (2 if end == "error" else -signal.SIGKILL)
    ended = eventually(lambda: not any(is_running(pid) for pid in workers))  # a worker checks its parent every 5 s
    for pid in workers:
        if not ended and is_running(pid):
            os.kill(pid, signal.SIGKILL)
    assert ended
