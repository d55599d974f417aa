"""The device that a process binds, on a machine with two fake GPUs; collectives that end because another rank has given up."""

import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from petra import ConfigError
from petra.distributed import all_gather_objects, bind_device
from petra.elastic.liveness import watched
from petra.errors import CommunicationError
from tests.support.processes import run_processes


class FakeGPUs:
    """Stands for torch.cuda's current device."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, count: int = 2) -> None:
        self.current, self.monkeypatch = 0, monkeypatch
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: self.current)
        monkeypatch.setattr(torch.cuda, "set_device", lambda device: setattr(self, "current", device.index))

    def bind(self, device: str | None) -> None:
        """Pretend that a process group is bound to a device."""
        self.monkeypatch.setattr(dist, "is_initialized", lambda: True)
        bound = None if device is None else torch.device(device)
        self.monkeypatch.setattr(dist, "group", SimpleNamespace(WORLD=SimpleNamespace(bound_device_id=bound)))


def test_a_device_becomes_the_current_one_or_is_that_of_the_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = FakeGPUs(monkeypatch)
    assert bind_device("cpu") == torch.device("cpu")
    for device, current in (("cuda", 0), ("cuda:1", 1), ("cuda", 1)):
        assert bind_device(device) == torch.device("cuda", current)
    gpus.current = 0
    gpus.bind("cuda:1")
    assert bind_device("cuda") == torch.device("cuda", 1)
    assert gpus.current == 1


@pytest.mark.parametrize(
    ("bound", "device", "text"),
    [
        ((2,), "cuda:2", "device: expected a GPU from cuda:0 to cuda:1, got cuda:2"),
        ((0,), "cuda", "device: expected cpu on a machine without GPUs, got cuda"),
        ("cuda:1", "cuda:0", "device: expected cuda:1, to which init_process_group bound this rank, got cuda:0"),
        (None, "cuda:0", "init_process_group: expected backend='cpu:gloo,cuda:nccl' with device_id=.*, got no device_id"),
        ("cuda:1", "cuda:5", "device: expected cuda:1"),
    ],
)
def test_devices_that_are_refused(monkeypatch: pytest.MonkeyPatch, bound: str | tuple[int] | None, device: str, text: str) -> None:
    """Another device than that of the process group, or without a group one that the machine with so many GPUs lacks."""
    if isinstance(bound, tuple):
        FakeGPUs(monkeypatch, *bound)
    else:
        FakeGPUs(monkeypatch).bind(bound)
    with pytest.raises(ConfigError, match=text):
        bind_device(device)


def gives_up(rank: int, folder: Path) -> list[int]:
    """Rank 0 stops waiting for rank 1, which takes part afterwards so that the collective ends."""
    left = 3

    def watch() -> None:
        nonlocal left
        left -= 1
        if left == 0:
            raise CommunicationError("lost")

    with watched(watch):
        found = all_gather_objects(rank)
    mine, other = (folder / name for name in (("gave up", "joined") if rank == 0 else ("joined", "gave up")))
    if rank == 0:
        with watched(watch), pytest.raises(CommunicationError, match="lost"):
            all_gather_objects(rank)
        mine.touch()
    while not other.exists():
        time.sleep(0.01)
    if rank == 1:
        all_gather_objects(rank)
        mine.touch()
    return found


@pytest.mark.processes
def test_a_watch_ends_the_wait_for_another_rank(tmp_path: Path) -> None:
    assert run_processes(2, gives_up, tmp_path / "processes", tmp_path) == [[0, 1], [0, 1]]
