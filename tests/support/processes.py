"""Run a function in several processes with their own process group and a timeout. No process is left running."""

import datetime
import multiprocessing
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from tests.structure import ROOT

# The fork server imports torch once, so that its children start in milliseconds instead of seconds.
context = multiprocessing.get_context("forkserver")
OURS = ["petra.models", "petra.training", "launch.train", "launch.config.compose", "launch.run.training"]
PRELOADED = ["torch", "torch.distributed", *OURS, "torch._dynamo", "matplotlib.figure", "pytest"]
context.set_forkserver_preload(PRELOADED)
PIPES: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}


def environment(**variables: str) -> dict[str, str]:
    """Return the environment of a program of this checkout."""
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **variables}


class Ended(NamedTuple):
    """How the processes of :func:`start` ended.

    Attributes:
        statuses: Exit status of each process: 0, 1 after an exception, negative for a signal, None if killed at the deadline.
        outputs: What each process wrote to stdout and stderr.
        results: Result of each process; None if it has none.
    """

    statuses: list[int | None]
    outputs: list[str]
    results: list[Any]

    def require(self) -> list[Any]:
        """Return the results.

        Raises:
            AssertionError: If a process failed, or still ran at the deadline. The message has all outputs.
        """
        text = "\n".join(f"process {r}: {status}\n{out}" for r, (status, out) in enumerate(zip(*self[:2], strict=True)))
        assert self.statuses == [0] * len(self.statuses), text
        return self.results


def run_processes(world: int, target: Callable[..., Any], folder: Path, *args: Any, timeout: float = 600) -> list[Any]:
    """Call ``target(rank, *args)`` in ``world`` gloo processes, and return the result of each.

    Raises:
        AssertionError: If a process fails, or still runs after ``timeout`` seconds.
    """
    return start(world, target, folder, *args, timeout=timeout).require()


def start(
    world: int,
    target: Callable[..., Any],
    folder: Path,
    *args: Any,
    timeout: float,
    grace: float = 5,
    make: Callable[..., Any] = context.Process,
    begin: Callable[[int, int, Path], None] | None = None,
) -> Ended:
    """Call ``target(rank, *args)`` in each of ``world`` processes.

    Args:
        folder: Folder for outputs, results and the group's store.
        grace: Seconds for which the other processes may run after one has failed.
        make: Class of the processes.
        begin: Function of rank, world and folder that each process calls first. By default it opens a gloo group.
    """
    folder.mkdir(parents=True, exist_ok=True)
    processes = [make(target=_child, args=(rank, world, folder, begin or _open_group, target, args)) for rank in range(world)]
    for process in processes:
        process.start()
    deadline = time.monotonic() + timeout
    try:
        while any(process.is_alive() for process in processes) and time.monotonic() < deadline:
            if any(process.exitcode for process in processes):
                deadline = min(deadline, time.monotonic() + grace)
            time.sleep(0.01)
        statuses = [process.exitcode for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.join()
    paths = [(folder / f"output{rank}.txt", folder / f"result{rank}.pt") for rank in range(world)]
    results = [torch.load(r, weights_only=False, map_location="cpu") if r.exists() else None for _, r in paths]
    return Ended(statuses, [path.read_text() for path, _ in paths], results)


def _child(
    rank: int, world: int, folder: Path, begin: Callable[..., None], target: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    redirect(folder / f"output{rank}.txt", 1, 2)
    torch.set_num_threads(1)  # a fork loses torch's pool of threads; threads of autograd would renew it at the same time, and fail
    try:
        begin(rank, world, folder)
        torch.save(target(rank, *args), folder / f"result{rank}.pt")
        if dist.is_initialized():
            dist.destroy_process_group()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    sys.stdout.flush()


def _open_group(rank: int, world: int, folder: Path) -> None:
    limit = datetime.timedelta(seconds=300)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world, timeout=limit)


def redirect(path: Path, *streams: int, append: bool = False) -> None:
    """Write what this process prints to a file."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | (os.O_APPEND if append else os.O_TRUNC))
    for stream in streams:
        os.dup2(file, stream)
    os.close(file)


def torchrun_variables(world: int, port: int) -> dict[str, Any]:
    """Return torchrun's environment variables that are the same in all processes, with a store at a port."""
    variables = {"WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return variables | {"TORCHELASTIC_USE_AGENT_STORE": True}


def is_running(pid: int) -> bool:
    """Return whether a process exists and is no zombie, which has ended and nobody waits for."""
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
