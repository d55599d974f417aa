"""Replicas whose processes are started and restarted separately: the replica of this process, and the supervisor of all replicas.

The supervisor keeps a store in which the replicas find each other, and restarts all processes of a replica if one of them fails.
Elsewhere, torchrun can start the processes of a replica, with the variables of this module in its environment.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from types import FrameType
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from petra.elastic.liveness import Liveness
from petra.elastic.membership import Membership
from petra.errors import require

from ..runtime.agent import stop_signals
from ..runtime.machine import LOOPBACK
from ..runtime.rank import Process, agree_on_start, integer
from ..runtime.reporting import CANCELLED, FAILED, STOPPED

REPLICA, STORE = "PETRA_REPLICA", "PETRA_STORE"
"""Environment variables: the index of a replica, and address and port of the store that all replicas share."""
SOON, ATTEMPTS = 60.0, 5
"""A replica is given up if it fails by itself this many times in a row, each time within this many seconds."""


@dataclass(frozen=True)
class Replica:
    """The replica that this process belongs to.

    Attributes:
        index: Index of the replica.
        process: Rank of this process in the replica, and the number of its processes.
        replicas: Number of replicas of the run.
        host, port: Address of the store that all replicas share.
    """

    index: int
    process: Process
    replicas: int
    host: str
    port: int

    @staticmethod
    def from_environment(process: Process, replicas: int) -> Replica:
        """Read the variables of this process.

        Raises:
            ConfigError: If one is missing or invalid.
        """
        note = " with cluster.elastic=true (petra train --nproc sets it)"
        index = integer(f"environment variable {REPLICA}", os.environ.get(REPLICA), 0, replicas - 1, note)
        store = os.environ.get(STORE, "")
        host, _, port = store.rpartition(":")
        require(bool(host) and port.isdecimal(), f"environment variable {STORE}", "<host>:<port>", store or "nothing")
        return Replica(index, process, replicas, host, int(port))

    def in_run(self, replicas: Sequence[int]) -> Process:
        """Return the rank of this process among those of ``replicas``."""
        own, position = self.process, replicas.index(self.index)
        return Process(position * own.world + own.rank, len(replicas) * own.world, own.local_rank, own.local_world)

    def membership(self, run: str, timeout: float) -> Membership:
        """Return this process's view of the replicas that take part. Every process of the replica must call this method.

        Args:
            run: Name of the run.
            timeout: Seconds after which a process that is missing counts as lost.
        """
        own = self.process
        store, _, _ = next(rendezvous("env://", timeout=timedelta(seconds=timeout)))
        incarnation = agree_on_start(PrefixStore(run, store), own.rank, own.world, timedelta(seconds=timeout))
        liveness = Liveness(self.host, self.port, run, incarnation, own.rank, own.world, timeout)
        return Membership(self.index, self.replicas, liveness)


class ReplicaProcesses:
    """The processes of one replica. If one of them fails, the others are killed, and all of them are started again.

    Args:
        start: Starts a process with these variables in its environment, and returns its :class:`subprocess.Popen`.
        index: Index of the replica.
        processes: Number of processes of the replica.
        port: Port of the store that all replicas share.

    Attributes:
        running: The processes, by rank.
        status: Largest exit status of the processes (negative: number of a signal), or None while they run or are restarted.
        restarts: Number of restarts.
    """

    def __init__(self, start: Callable[[Mapping[str, str]], Any], index: int, processes: int, port: int) -> None:
        self._start = start
        self._store = dist.TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
        environment = {
            REPLICA: str(index),
            STORE: f"{LOOPBACK}:{port}",
            "WORLD_SIZE": str(processes),
            "LOCAL_WORLD_SIZE": str(processes),
            "MASTER_ADDR": LOOPBACK,
            "MASTER_PORT": str(self._store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RUN_ID": f"replica{index}",
        }
        self._environments = [environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(processes)]
        self.status: int | None = None
        self.restarts = self._failures = 0
        self.begin()

    def begin(self) -> None:
        """Start all processes."""
        self.running = [self._start(environment) for environment in self._environments]
        self._started = time.monotonic()

    def signal(self, number: int) -> None:
        """Send a signal to the processes that still run."""
        for process in self.running:
            process.send_signal(number)

    def supervise(self, *, restart: bool) -> None:
        """Look after the processes. Call this method a few times per second.

        Args:
            restart: Whether to restart a replica that has failed.
        """
        if self.status is not None:
            return
        statuses = [process.poll() for process in self.running]
        failures = [status for status in statuses if status]
        stopped = bool({*failures} & {STOPPED, CANCELLED})
        if None in statuses:
            if failures and not stopped:
                self.signal(signal.SIGKILL)
            return
        by_itself = max(failures, default=0) > 0 and time.monotonic() - self._started < SOON
        self._failures = self._failures + 1 if by_itself else 0
        if failures and restart and not stopped and self._failures < ATTEMPTS:
            self.restarts += 1
            self.begin()
        else:
            self.status = max(failures, default=0)


def run_replicas(processes: int, replicas: int, name: str, arguments: Sequence[str]) -> None:
    """Start the command ``petra name arguments`` in the processes of all replicas, restart those that fail, and exit with a status.

    The status is 0 if a replica has finished the run. Signals that ask a run to stop are forwarded each time they arrive.

    Args:
        processes: Number of processes, of all replicas together.
        replicas: Number of replicas.
    """
    command = [sys.executable, "-m", "petra", name, *arguments]

    def start(variables: Mapping[str, str]) -> subprocess.Popen[bytes]:
        # In sessions of their own, so that a terminal does not also send them Ctrl-C: a second one ends a process at once.
        return subprocess.Popen(command, env={"OMP_NUM_THREADS": "1", **os.environ, **variables}, start_new_session=True)

    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # until it is forwarded
    store = dist.TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    started = [ReplicaProcesses(start, index, processes // replicas, store.port) for index in range(replicas)]
    stopping = False

    def forward(number: int, frame: FrameType | None) -> None:
        nonlocal stopping
        stopping = True
        for replica in started:
            replica.signal(number)

    for number in stop_signals():
        signal.signal(number, forward)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    try:
        while any(replica.status is None for replica in started):
            for replica in started:
                replica.supervise(restart=not stopping)
            time.sleep(0.05)
    finally:
        for replica in started:
            replica.signal(signal.SIGKILL)
    statuses = [replica.status or 0 for replica in started]
    sys.exit(next((status for status in (0, STOPPED, CANCELLED) if status in statuses), FAILED))
