"""Which processes of a run have ended: each listens on a port, and a refused connection shows that it has ended."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from datetime import timedelta
from threading import Thread

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from petra.distributed import run_collective

POLL, PROBE = 0.01, 0.2
"""Seconds between two looks at the store, and between two attempts to connect to a process that is missing."""
WATCH_SECONDS = 0.1
"""Seconds between two calls of a function that watches a collective."""
PRESENT = "present"
Member = tuple[int, str]
"""Index and incarnation of a replica. An incarnation is one start of all its processes."""


class Liveness:
    """What is known about the incarnations of all replicas. A replica is lost if one of its processes is.

    Args:
        host, port: Address of the store, which all processes share.
        run: Name of the run, because one store may serve several.
        incarnation: Incarnation of this process's replica.
        process: Index of this process in the replica.
        processes: Number of processes of each replica.
        timeout: Seconds after which a process that is missing counts as lost.
    """

    def __init__(self, host: str, port: int, run: str, incarnation: str, process: int, processes: int, timeout: float) -> None:
        limit = timedelta(seconds=timeout)
        self.store = PrefixStore(run, dist.TCPStore(host, port, is_master=False, timeout=limit))  # type: ignore[attr-defined]
        self.incarnation, self.process, self.processes, self.timeout = incarnation, process, processes, timeout
        self._probed: dict[tuple[str, int], float] = {}
        self._beacon = _listen(host, port)
        self.store.set(f"address/{incarnation}/{process}", json.dumps(self._beacon.getsockname()[:2]))

    def declare_lost(self, incarnation: str) -> None:
        """Tell all processes that a replica is lost."""
        self.store.set(f"lost/{incarnation}", "")

    def declared_lost(self, incarnation: str) -> bool:
        """Return whether a process has declared a replica lost."""
        return bool(self.store.check([f"lost/{incarnation}"]))

    def is_lost(self, incarnation: str, processes: Iterable[int] | None = None) -> bool:
        """Return whether a replica was declared lost, or one of the given processes has ended.

        Args:
            processes: Processes to connect to; None for all.
        """
        if self.declared_lost(incarnation):
            return True
        lost = any(self._has_ended(incarnation, p) for p in (range(self.processes) if processes is None else processes))
        if lost:
            self.declare_lost(incarnation)
        return lost

    def any_lost(self, members: Iterable[Member]) -> bool:
        """Return whether one of the members is lost."""
        return any(self.is_lost(incarnation) for _, incarnation in members)

    def wait_for(
        self,
        members: Sequence[Member],
        prefix: str,
        decided: Callable[[], bool],
        processes: Sequence[int] | None = None,
        timeouts: int = 1,
    ) -> list[Member]:
        """Return the members whose processes have all set the key ``<prefix>/<incarnation>/<process>``.

        Wait for the others until they are lost.

        Args:
            decided: Returns whether to stop waiting.
            processes: Processes to wait for in each replica; None for all.
            timeouts: Number of timeouts after which a missing process counts as lost.
        """
        processes = range(self.processes) if processes is None else processes
        present, missing, until = list[Member](), list(members), time.monotonic() + timeouts * self.timeout
        while missing and not decided():
            for member in [*missing]:
                absent = [p for p in processes if not self.store.check([f"{prefix}/{member[1]}/{p}"])]
                if not absent:
                    present.append(member)
                elif time.monotonic() > until:
                    self.declare_lost(member[1])
                elif not self.is_lost(member[1], absent):
                    continue
                missing.remove(member)
            time.sleep(POLL)
        return [member for member in members if member in present]

    def _has_ended(self, incarnation: str, process: int) -> bool:
        """Return whether a process refuses a connection. Asks at most once in :data:`PROBE` seconds."""
        now, key = time.monotonic(), (incarnation, process)
        if key == (self.incarnation, self.process) or now - self._probed.get(key, 0) < PROBE:
            return False
        self._probed[key] = now
        try:
            socket.create_connection(json.loads(self.store.get(f"address/{incarnation}/{process}")), timeout=PROBE).close()
        except OSError as error:  # of a machine that doesn't answer, processes are lost after the timeout
            return isinstance(error, ConnectionError)
        return False


@contextmanager
def watched(watch: Callable[[], None]) -> Iterator[None]:
    """Call ``watch`` from time to time while this thread waits in :func:`petra.distributed.all_gather_objects`.

    An error of ``watch`` ends the wait. A collective of gloo fails at once only in ranks that exchange data with one that has died.
    The others wait for a rank that has failed, until the timeout.
    """

    def run(collective: Callable[[], object]) -> None:
        done: Future[object] = Future()

        def call() -> None:
            try:
                done.set_result(collective())
            except Exception as error:
                done.set_exception(error)

        Thread(target=call, daemon=True).start()  # after an error of watch, it ends when the process group does
        while not wait([done], WATCH_SECONDS).done:
            watch()
        done.result()

    token = run_collective.set(run)
    try:
        yield
    finally:
        run_collective.reset(token)


def _listen(host: str, port: int) -> socket.socket:
    """Listen on a free port of the interface that leads to ``host``, and close every connection at once."""
    with socket.create_connection((host, port)) as connection:
        listener = socket.create_server((connection.getsockname()[0], 0))

    def accept() -> None:
        while True:
            with suppress(OSError):
                listener.accept()[0].close()

    Thread(target=accept, daemon=True).start()
    return listener
