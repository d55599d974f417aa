"""Run functions of tests in processes that have the emulated device, with a timeout. No process is left running."""

from __future__ import annotations

import atexit
import datetime
import fcntl
import functools
import json
import os
import pickle
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist

from tests.emulated.build import library
from tests.emulated.device import Options

ROOT = Path(__file__).parents[2]
DEVICES = 8
"""Devices of the server's processes: torch reads the number once, before the first backward pass."""


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
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "arguments").write_bytes(pickle.dumps(arguments))
        request = {
            "target": f"{target.__module__}:{target.__name__}",
            "folder": name,
            "world": world,
            "options": {**asdict(options), "devices": DEVICES},
            "timeout": timeout,
            "group_timeout": group_timeout,
            "waits_for_all": waits_for_all,
            "environment": _torchrun(store, world) if store is not None else {},
        }
        server = _server()
        print(json.dumps(request), file=server, flush=True)
        statuses = json.loads(server.readline())
        outputs = [(folder / f"output{rank}.txt").read_text() for rank in range(world)]
        found = [folder / f"result{rank}.pt" for rank in range(world)]
        results = [torch.load(path, weights_only=False, map_location="cpu") if path.exists() else None for path in found]
    return Ended(statuses, outputs, results)


def _torchrun(store: dist.TCPStore, world: int) -> dict[str, str]:
    variables = {"WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store.port}
    return {name: str(value) for name, value in variables.items()} | {"TORCHELASTIC_USE_AGENT_STORE": "True"}


@functools.cache
def _server() -> IO[str]:
    """Connect this process to the server of the test run, which the first process that needs it starts."""
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID", str(os.getpid()))
    cache = library().parent.parent
    path = cache / f"{run}.socket"
    client = socket.socket(socket.AF_UNIX)
    with open(cache / "servers.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if client.connect_ex(str(path)):  # not started yet, or the process that started it has ended
            path.unlink(missing_ok=True)
            server = _start_server(path)
            while client.connect_ex(str(path)):
                assert server.poll() is None, "the server of the emulated device did not start"
                time.sleep(0.01)
    return client.makefile("rw")


def _start_server(path: Path) -> subprocess.Popen[bytes]:
    """Start a server that ends with this process."""
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    paths = os.pathsep.join([*filter(None, given), str(ROOT)])
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.emulated.server", str(path), str(DEVICES)]
    server = subprocess.Popen(command, stdin=subprocess.PIPE, env=environment)
    atexit.register(server.communicate)  # closes its stdin, which ends it
    return server


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
