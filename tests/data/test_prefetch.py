"""Worker processes that prepare microbatches: correct results in order, and no process left behind."""

from __future__ import annotations

import multiprocessing
import os
import re
import resource
import signal
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch

from petra.data import EvalSource, TrainSource, load_dataset
from petra.data.prefetch import PREFETCH_FACTOR, Prefetcher
from petra.errors import DataError
from tests.support.fakes import write_image_folders


def doubled(m: int) -> torch.Tensor:
    return torch.tensor([2 * m, os.getpid()])


def test_numbers_come_in_order_from_other_processes() -> None:
    prefetch = Prefetcher(doubled, workers=2)
    for m in (0, 1, 2, 3, 4, 100, 101, 7, 8, 8):  # jumps and repetitions restart the workers
        found, process = prefetch(m).tolist()
        assert found == 2 * m
        assert process != os.getpid()


def test_any_timeout_is_accepted() -> None:
    """The loader refuses more than 2^31 ms."""
    try:
        found = Prefetcher(doubled, workers=1, stop=1, timeout=1e7)(0)[0].item()
    except OverflowError as error:
        found = repr(error)
    assert found == 0


def test_number_of_prefetched_results_is_limited(tmp_path: Path) -> None:
    def recorded(m: int) -> torch.Tensor:
        (tmp_path / str(m)).touch()
        return torch.tensor(m)

    prefetch = Prefetcher(recorded, workers=2)
    prefetch(0)
    deadline = time.monotonic() + 10
    while len(list(tmp_path.iterdir())) < 1 + 2 * PREFETCH_FACTOR and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.1)
    assert {int(path.name) for path in tmp_path.iterdir()} == set(range(1 + 2 * PREFETCH_FACTOR))


def test_workers_exit_after_the_last_number() -> None:
    prefetch = Prefetcher(doubled, workers=2, stop=3)
    for _ in range(2):
        assert [prefetch(m)[0].item() for m in range(3)] == [0, 2, 4]
        assert not multiprocessing.active_children()


def test_microbatches_are_the_same_with_workers(tmp_path: Path) -> None:
    write_image_folders(tmp_path)
    data = load_dataset("imagenet", root=tmp_path, size=12)
    for plain, prefetched in (
        (TrainSource(data, 5, seed=2), TrainSource(data, 5, seed=2, workers=2)),
        (EvalSource(data, 4), EvalSource(data, 4, workers=2)),
    ):
        for m in (0, 1, 0, 1):
            assert torch.equal(plain.inputs(m), prefetched.inputs(m))
            assert torch.equal(plain.targets(m), prefetched.targets(m))


def test_damaged_file_is_reported_as_without_workers(tmp_path: Path) -> None:
    write_image_folders(tmp_path)
    (tmp_path / "val" / "n01" / "0.JPEG").write_bytes(b"no image")
    source = EvalSource(load_dataset("imagenet", root=tmp_path, size=12), 2, workers=1)
    assert source.inputs(0).shape == (2, 3, 12, 12)
    with pytest.raises(DataError) as error:
        source.inputs(1)
    assert str(error.value).startswith(f"{tmp_path}/val/n01/0.JPEG: can't be read")
    assert len(str(error.value).splitlines()) == 1


def test_worker_that_dies_is_reported() -> None:
    def dies(m: int) -> torch.Tensor:
        if m == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.tensor(m)

    prefetch = Prefetcher(dies, workers=1)
    with pytest.raises(DataError, match=r"data\.workers: a worker process died \(DataLoader worker .*/dev/shm"):
        sum(prefetch(m) for m in range(3))


def test_full_shared_memory_is_reported() -> None:
    """A limit on the size of files stands for a full /dev/shm: both make the allocation of shared memory fail."""

    def limited(m: int) -> torch.Tensor:
        if m == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
        return torch.zeros(1000)

    prefetch = Prefetcher(limited, workers=1, timeout=20)
    prefetch(0)
    with pytest.raises(DataError, match=r"data\.workers: no room in shared memory \(/dev/shm\) .*--shm-size") as error:
        prefetch(1)
    assert len(str(error.value).splitlines()) == 1


def test_worker_that_does_not_answer_is_reported() -> None:
    def sleeps(m: int) -> torch.Tensor:
        time.sleep(m * 60)
        return torch.zeros(1)

    prefetch = Prefetcher(sleeps, workers=1, timeout=1)
    prefetch(0)
    with pytest.raises(DataError, match=r"data\.workers: no worker process has prepared the microbatch within 1 s"):
        prefetch(1)


def _few_files(sender: Connection) -> None:
    limit = len(os.listdir("/proc/self/fd")) + 12
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    try:
        prefetch = Prefetcher(doubled, workers=8)
        for m in range(40):
            prefetch(m)
    except DataError as error:
        sender.send(str(error))


@pytest.mark.processes
def test_too_many_open_files_are_reported(capfd: pytest.CaptureFixture[str]) -> None:
    context = multiprocessing.get_context("forkserver")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_few_files, args=(sender,))
    process.start()
    sender.close()
    assert receiver.poll(60)
    assert re.fullmatch(r"data\.workers: 8 worker processes can't be started \(Too many open files\); .*", receiver.recv())
    process.join(20)
    assert process.exitcode == 0
    assert not capfd.readouterr().err


def test_other_errors_are_not_reported_as_a_dead_worker() -> None:
    def wrong(m: int) -> torch.Tensor:
        raise RuntimeError("a programming error")

    with pytest.raises(RuntimeError, match="a programming error"):
        Prefetcher(wrong, workers=1)(0)


@pytest.mark.processes
@pytest.mark.parametrize("end", ["killed", "error"])
def test_no_worker_outlives_its_parent(end: str) -> None:
    context = multiprocessing.get_context("forkserver")
    receiver, sender = context.Pipe(duplex=False)
    parent = context.Process(target=_prefetching, args=(sender, end))
    parent.start()
    assert receiver.poll(60)
    workers = receiver.recv()
    assert len(workers) == 2
    if end == "killed":
        parent.kill()
    parent.join(timeout=30)
    assert parent.exitcode == (-signal.SIGKILL if end == "killed" else 2)
    deadline = time.monotonic() + 20  # a worker checks its parent every 5 s
    while any(_alive(pid) for pid in workers) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(_alive(pid) for pid in workers)


def _prefetching(sender: Connection, end: str) -> None:
    prefetch = Prefetcher(doubled, workers=2)
    prefetch(0)
    sender.send([child.pid for child in multiprocessing.active_children()])
    if end == "error":
        sys.exit(2)
    time.sleep(60)


def _alive(pid: int) -> bool:
    """Return whether a process is running. A process that has ended and that nobody waits for stays as a zombie."""
    status = Path(f"/proc/{pid}/status")
    try:
        return "State:\tZ" not in status.read_text()
    except OSError:
        return False
