"""Bound on the rounds by which a GPU is behind its host."""

from __future__ import annotations

from collections import deque

import torch

from petra.specs import Message
from petra.transport import Port
from petra.transport.port import WrappedPort

AHEAD = 4
"""Rounds that a GPU may be behind its host. If a neighbour is slow, pinned memory would otherwise grow with the length of a run; so
would the reserved memory of the allocator over the transport edge (tests/emulated)."""
Running = deque[tuple[int, torch.cuda.Event]]  # microbatch of each of the last rounds, and the event at its end


class PacedPort(WrappedPort):
    """Port of a process's first stage. Each send ends a round, and waits until the GPU has finished the round :data:`AHEAD` before.

    The wait can't deadlock: what a GPU does up to a round depends only on what other hosts launch up to that round, and the host
    that is in the earliest round never waits for a later one.
    """

    def __init__(self, inner: Port, running: Running) -> None:
        super().__init__(inner)
        self.running = running

    def send(self, m: int, message: Message) -> None:
        self.inner.send(m, message)
        if len(self.running) == AHEAD:
            self.running[0][1].synchronize()
            self.running.popleft()
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        self.running.append((m, event))


def paced(upstream: Port, downstream: Port) -> tuple[Port, Port]:
    """Return the ports of a process's first stage with the bound. In each of its rounds, a stage sends one message."""
    running: Running = deque()
    return PacedPort(upstream, running), PacedPort(downstream, running)


def unfinished(port: Port) -> list[int]:
    """Return the microbatches of the rounds that the GPU has not finished, given a port of the first stage."""
    while isinstance(port, WrappedPort) and not isinstance(port, PacedPort):
        port = port.inner
    return [m for m, event in list(getattr(port, "running", ())) if not event.query()]
