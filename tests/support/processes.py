"""Run a function in several processes with their own process group and a timeout. No process is left running."""

from __future__ import annotations

import datetime
import multiprocessing
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

# The fork server imports torch once, so that its children start in milliseconds instead of seconds.
context = multiprocessing.get_context("forkserver")
OURS = ["petra.models", "petra.training", "launch.train", "launch.config.compose", "launch.run.training"]
PRELOADED = ["torch", "torch.distributed", *OURS, "torch._dynamo", "matplotlib.figure", "pytest"]
context.set_forkserver_preload(PRELOADED)


def run_processes(world: int, target: Callable[..., Any], folder: Path, *args: Any, timeout: float = 600) -> list[Any]:
    """Call ``target(rank, *args)`` in ``world`` gloo processes, and return the result of each.

    Raises:
        AssertionError: If a process fails, or still runs after ``timeout`` seconds.
    """
    folder.mkdir(parents=True, exist_ok=True)
    processes = [context.Process(target=_child, args=(rank, world, target, str(folder), args)) for rank in range(world)]
    for process in processes:
        process.start()
    deadline = time.monotonic() + timeout
    try:
        while any(p.is_alive() for p in processes) and time.monotonic() < deadline:
            if any(p.exitcode not in (None, 0) for p in processes):
                deadline = min(deadline, time.monotonic() + 5)
            time.sleep(0.02)
        hung = [rank for rank, p in enumerate(processes) if p.is_alive()]
    finally:
        for process in processes:
            process.kill()
            process.join()
    errors = [path.read_text() for path in sorted(folder.glob("error*.txt"))]
    assert not errors, "\n".join(errors)
    assert not hung, f"processes {hung} of {world} still ran after {timeout} s"
    return [torch.load(folder / f"result{rank}.pt", weights_only=False) for rank in range(world)]


def _child(rank: int, world: int, target: Callable[..., Any], folder: str, args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world, timeout=datetime.timedelta(seconds=300)
        )
        torch.save(target(rank, *args), Path(folder) / f"result{rank}.pt")
        dist.destroy_process_group()
    except BaseException:
        (Path(folder) / f"error{rank}.txt").write_text(f"process {rank}:\n{traceback.format_exc()}")
        raise
