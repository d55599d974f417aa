"""Run functions of tests in processes that have the emulated device, with a timeout. No process is left running."""

from __future__ import annotations

import datetime
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from multiprocessing import forkserver, popen_forkserver
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.emulated import device
from tests.emulated.device import Options

ROOT = Path(__file__).parents[2]
DEVICES = 8
"""Devices of every process: torch reads the number once, before the first backward pass."""
_server = forkserver.ForkServer()
_server.set_forkserver_preload(["tests.emulated.preload"])


def core(values: Iterable[Any], kept: Collection[int]) -> list[Any]:
    """Return the values of a parametrized test. ``make test`` runs those whose index is in ``kept``, ``make stress`` all."""
    pairs = [(i, value if isinstance(value, tuple) else (value,)) for i, value in enumerate(values)]
    return [pytest.param(*value, marks=[] if i in kept else pytest.mark.stress) for i, value in pairs]


class _Popen(popen_forkserver.Popen):
    def _launch(self, process_obj: Any) -> None:
        paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        with (
            mock.patch.object(forkserver, "connect_to_new_process", _server.connect_to_new_process),
            mock.patch.dict(os.environ, PYTHONPATH=paths, OMP_NUM_THREADS="1"),
        ):
            super()._launch(process_obj)  # type: ignore[misc]


class _Process(ForkServerProcess):
    """A process forked from one that has imported torch with the emulated device, and petra."""

    @staticmethod
    def _Popen(process_obj: Any) -> Any:
        return _Popen(process_obj)


@dataclass(frozen=True)
class Ended:
    """How the processes of :func:`start` ended.

    Attributes:
        statuses: Exit status of each process: 0, 1 after an exception, negative for a signal, None if killed at the deadline.
        outputs: What each process wrote to stdout and stderr.
        results: Result of each process; None if it has none.
    """

    statuses: list[int | None]
    outputs: list[str]
    results: list[Any]


def run(target: Callable[..., Any], *arguments: Any, world: int = 1, **settings: Any) -> list[Any]:
    """Call a function in processes with the emulated device; see :func:`start` for the settings. Return the result of each.

    Raises:
        AssertionError: If a process fails, or still runs at the end of the time limit.
    """
    ended = start(target, *arguments, world=world, **settings)
    text = "\n".join(f"process {rank}: {status}\n{ended.outputs[rank]}" for rank, status in enumerate(ended.statuses))
    assert ended.statuses == [0] * world, text
    return ended.results


def start(
    target: Callable[..., Any],
    *arguments: Any,
    world: int = 1,
    options: Options = Options(),  # noqa: B008 (frozen)
    timeout: float = 60,
    group_timeout: float = 30,
    waits_for_all: bool = False,
    torchrun: bool = False,
) -> Ended:
    """Call ``target(*arguments)`` in one process, or ``target(rank, *arguments)`` in each of ``world`` processes with a group.

    Args:
        target: A function of a module.
        arguments: Values that can be pickled.
        world: Number of processes. Rank r is bound to device r.
        options: Delays and faults.
        timeout: Seconds after which processes are killed.
        group_timeout: Seconds after which an operation of the process group fails.
        waits_for_all: Whether the other processes may run until ``timeout`` after one has failed; otherwise 3 seconds.
        torchrun: Set the environment variables of torchrun, and open no group.
    """
    # As with torchrun, the store is not in a process that may be killed.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if torchrun else None
    variables: dict[str, Any] = {}
    if store is not None:
        variables = {"WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store.port}
        variables["TORCHELASTIC_USE_AGENT_STORE"] = True
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        request = (folder, target, arguments, replace(options, devices=DEVICES), None if torchrun else group_timeout, variables)
        processes = [_Process(target=_child, args=(rank, world, *request)) for rank in range(world)]
        for process in processes:
            process.start()
        deadline = time.monotonic() + timeout
        while any(process.is_alive() for process in processes) and time.monotonic() < deadline:
            if any(process.exitcode for process in processes) and not waits_for_all:
                deadline = min(deadline, time.monotonic() + 3)
            time.sleep(0.005)
        statuses = [process.exitcode for process in processes]
        for process in processes:
            process.kill()
            process.join()
        outputs = [(folder / f"output{rank}.txt").read_text() for rank in range(world)]
        found = [folder / f"result{rank}.pt" for rank in range(world)]
        results = [torch.load(path, weights_only=False, map_location="cpu") if path.exists() else None for path in found]
    return Ended(statuses, outputs, results)


def _child(
    rank: int,
    world: int,
    folder: Path,
    target: Callable[..., Any],
    arguments: tuple[Any, ...],
    options: Options,
    group_timeout: float | None,
    variables: dict[str, Any],
) -> None:
    with open(folder / f"output{rank}.txt", "w", buffering=1) as output:
        for stream in (1, 2):
            os.dup2(output.fileno(), stream)
    os.environ.update({name: str(value) for name, value in {**variables, "RANK": rank, "LOCAL_RANK": rank}.items()})
    torch.set_num_threads(1)  # a fork loses torch's pool of threads; threads of autograd would renew it at the same time, and fail
    status = 1
    try:
        device.configure(options)
        if world > 1 and group_timeout is not None:
            open_group(rank, world, folder, group_timeout)
        result = target(*arguments) if world == 1 and group_timeout is not None else target(rank, *arguments)
        torch.save(result, folder / f"result{rank}.pt")
        if dist.is_initialized():
            dist.destroy_process_group()
        status = 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def open_group(rank: int, world: int, folder: Path, timeout: float) -> None:
    """Open the default process group of a child process, bound to the device of its rank."""
    torch.cuda.set_device(rank)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world,
        timeout=datetime.timedelta(seconds=timeout),
        device_id=torch.device("cuda", rank),
    )
