"""Run launch.train in forked processes with torchrun's environment. Imports are shared, so tests can start hundreds of runs."""

import math
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist

from launch import train
from launch.runtime import reporting
from tests.support.processes import context, redirect, torchrun_variables

TIMEOUT = 20
"""Seconds, for ``trainer.timeout``."""


class Forked:
    """The processes of one run. All of them are killed when the context ends.

    Args:
        folder: Working directory of the processes. Each writes its output there, to ``out`` and ``err`` followed by its rank.
        overrides: Overrides of launch.train.
        world: Number of processes. A single process runs without torchrun's environment.
        environment: Environment variables in addition to torchrun's.
        prepare: Function that each process calls first with its rank, to inject a fault.
    """

    def __init__(
        self,
        folder: Path,
        overrides: Sequence[str],
        world: int,
        environment: Mapping[str, str] | None = None,
        prepare: Callable[[int], None] | None = None,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        # As with torchrun, the store is not in a process that may be killed.
        self.folder, self._store = folder, dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        error_file = Path(tempfile.mkdtemp(dir=folder), "0", "error.json")
        variables = {**torchrun_variables(world, self._store.port), "TORCHELASTIC_ERROR_FILE": error_file}
        torchrun = {name: str(value) for name, value in variables.items()} if world > 1 else {}
        common = {**torchrun, **(environment or {})}
        arguments = (str(folder), [f"trainer.timeout={TIMEOUT}", *overrides], common, prepare)
        self.processes = [context.Process(target=main, args=(rank, *arguments)) for rank in range(world)]

    def __enter__(self) -> Self:
        for process in self.processes:
            process.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for process in self.processes:
            process.kill()
            process.join()

    def signal(self, number: signal.Signals, ranks: Sequence[int] | None = None) -> None:
        """Send a signal to the given ranks, or to all, as far as they still run."""
        for rank in range(len(self.processes)) if ranks is None else ranks:
            pid = self.processes[rank].pid
            if self.processes[rank].is_alive() and pid is not None:
                with suppress(ProcessLookupError):
                    os.kill(pid, number)

    def wait(self, seconds: float, but: Sequence[int] = ()) -> list[int | None]:
        """Wait for all ranks except those in ``but``. Return the status of every process, None if it still runs.

        Raises:
            AssertionError: If a process still runs after ``seconds``.
        """
        deadline = time.monotonic() + seconds
        waited = [process for rank, process in enumerate(self.processes) if rank not in but]
        for process in waited:
            process.join(max(0.0, deadline - time.monotonic()))
        hung = [rank for rank, process in enumerate(self.processes) if process.is_alive() and rank not in but]
        assert not hung, f"processes {hung} still ran after {seconds} s: {self.output()}"
        return [process.exitcode for process in self.processes]

    def finish(self, seconds: float = 120) -> tuple[str, str]:
        """Wait until all processes have ended with status 0. Return what they have written to stdout and stderr.

        Raises:
            AssertionError: If a process fails, or still runs after ``seconds``.
        """
        statuses = self.wait(seconds)
        assert statuses == [0] * len(self.processes), self.output()
        return self.output("out"), self.output("err")

    def output(self, stream: str = "err") -> str:
        """Return what all processes have written to stderr, or to stdout (``out``)."""
        return "".join(path.read_text() for path in sorted(self.folder.glob(f"{stream}?")))


def used(pid: int | None, seconds: float = math.inf) -> float:
    """Wait until a process has used ``seconds`` of CPU time or has ended. Return its CPU time."""
    found = 0.0
    with suppress(OSError):  # the process has ended
        while True:
            state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            found = (int(fields[10]) + int(fields[11])) / os.sysconf("SC_CLK_TCK")
            if found >= seconds or state == "Z":
                break
            time.sleep(0.005)
    return found


def main(name: Any, folder: str, overrides: list[str], environment: dict[str, str], prepare: Callable[[Any], None] | None) -> None:
    """Run launch.train in this process, whose name is its rank unless the environment has one."""
    torch.set_num_threads(1)
    os.environ.update(environment)
    if "WORLD_SIZE" in environment and "RANK" not in environment:
        os.environ.update(RANK=str(name), LOCAL_RANK=str(name))
    os.chdir(folder)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup lets processes ignore it
    for stream, start in ((1, "out"), (2, "err")):
        redirect(Path(f"{start}{name}"), stream, append=not isinstance(name, int))  # a replica's process may be started again
    reporting.ORIGIN_WAIT = 1.0  # here no agent stops the other processes
    sys.argv = ["launch.train", *overrides]
    if prepare is not None:
        prepare(name)
    train.main()
