"""launch.train as torchrun starts it, in processes that are forked with everything imported: tests can start hundreds."""

from __future__ import annotations

import math
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType

import torch.distributed as dist

from launch import train
from launch.runtime import reporting
from tests.support.processes import context

TIMEOUT = 20
"""``trainer.timeout`` of these runs in seconds."""


class Forked:
    """The processes of one start of a run; whatever happens, none is left when the block ends.

    Args:
        folder: where the processes work, and leave what they print: ``out`` and ``err`` with their rank.
        environment: beside torchrun's variables.
        prepare: called first in each process with its rank, to break something.
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
        # torchrun's agent, too, has the store, not a process that may be killed.
        self.folder, self._store = folder, dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        place = {
            "WORLD_SIZE": world,
            "LOCAL_WORLD_SIZE": world,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": self._store.port,
            "TORCHELASTIC_USE_AGENT_STORE": True,
        }
        common = {**{name: str(value) for name, value in place.items()}, **(environment or {})}
        arguments = (str(folder), [f"trainer.timeout={TIMEOUT}", *overrides], common, prepare)
        self.processes = [context.Process(target=_main, args=(rank, *arguments)) for rank in range(world)]

    def __enter__(self) -> Forked:
        for process in self.processes:
            process.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for process in self.processes:
            process.kill()
            process.join()

    def signal(self, number: signal.Signals, ranks: Sequence[int] | None = None) -> None:
        """Sends a signal to those of the ranks, or of all, that still run."""
        for rank in range(len(self.processes)) if ranks is None else ranks:
            pid = self.processes[rank].pid
            if self.processes[rank].is_alive() and pid is not None:
                with suppress(ProcessLookupError):
                    os.kill(pid, number)

    def wait(self, seconds: float, but: Sequence[int] = ()) -> list[int | None]:
        """The status of every process, None for those in ``but``.

        Raises:
            AssertionError: one still ran after so many seconds.
        """
        deadline = time.monotonic() + seconds
        waited = [process for rank, process in enumerate(self.processes) if rank not in but]
        for process in waited:
            process.join(max(0.0, deadline - time.monotonic()))
        hung = [rank for rank, process in enumerate(self.processes) if process.is_alive() and rank not in but]
        assert not hung, f"processes {hung} still ran after {seconds} s: {self.told()}"
        return [process.exitcode for process in self.processes]

    def told(self, stream: str = "err") -> str:
        """What all processes have written to stderr, or to stdout (``out``)."""
        return "".join(path.read_text() for path in sorted(self.folder.glob(f"{stream}?")))


def used(pid: int | None, seconds: float = math.inf) -> float:
    """Waits until a process has used so many seconds of the processor, or ended; how many it has."""
    found = 0.0
    with suppress(OSError):  # it has ended
        while True:
            state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            found = (int(fields[10]) + int(fields[11])) / os.sysconf("SC_CLK_TCK")
            if found >= seconds or state == "Z":
                break
            time.sleep(0.005)
    return found


def _main(rank: int, folder: str, overrides: list[str], environment: dict[str, str], prepare: Callable[[int], None] | None) -> None:
    os.environ.update(environment, RANK=str(rank), LOCAL_RANK=str(rank))
    os.chdir(folder)
    for stream, name in ((1, "out"), (2, "err")):
        file = os.open(f"{name}{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, stream)
        os.close(file)
    reporting.ORIGIN_WAIT = 1.0  # here no agent stops the other processes
    sys.argv = ["launch.train", *overrides]
    if prepare is not None:
        prepare(rank)
    train.main()
