"""Run functions of tests in processes that have the emulated device, with a timeout. No process is left running."""

import datetime
import os
import tempfile
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from functools import partial
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
from tests.structure import ROOT
from tests.support import processes
from tests.support.processes import Ended, torchrun_variables

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


def run(target: Callable[..., Any], *arguments: Any, **settings: Any) -> list[Any]:
    """Call a function in processes with the emulated device; see :func:`start` for the settings. Return the result of each.

    Raises:
        AssertionError: If a process fails, or still runs at the end of the time limit.
    """
    return start(target, *arguments, **settings).require()


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

    Rank r is bound to device r. See :func:`tests.support.processes.start` for what is not listed.

    Args:
        options: Delays and faults.
        group_timeout: Seconds after which an operation of the process group fails.
        waits_for_all: Whether the other processes may run until ``timeout`` after one has failed; otherwise 3 seconds.
        torchrun: Set the environment variables of torchrun, and open no group.
    """
    # As with torchrun, the store is not in a process that may be killed.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if torchrun else None
    variables = {} if store is None else torchrun_variables(world, store.port)
    if world == 1 and not torchrun:
        target, arguments = _without_rank, (target, *arguments)
    begin = partial(_begin, replace(options, devices=DEVICES), None if torchrun else group_timeout, variables)
    grace = timeout if waits_for_all else 3
    with tempfile.TemporaryDirectory() as folder:
        return processes.start(world, target, Path(folder), *arguments, timeout=timeout, grace=grace, make=_Process, begin=begin)


def _without_rank(rank: int, target: Callable[..., Any], *arguments: Any) -> Any:
    return target(*arguments)


def _begin(options: Options, timeout: float | None, variables: dict[str, Any], rank: int, world: int, folder: Path) -> None:
    os.environ.update({name: str(value) for name, value in {**variables, "RANK": rank, "LOCAL_RANK": rank}.items()})
    device.configure(options)
    if world == 1 or timeout is None:
        return
    torch.cuda.set_device(rank)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world,
        timeout=datetime.timedelta(seconds=timeout),
        device_id=torch.device("cuda", rank),
    )
