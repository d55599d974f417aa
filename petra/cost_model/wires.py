"""Simulated transports: when messages between processes arrive, by the rules of each transport in :mod:`petra.transport`."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from petra.cost_model.links import Link
from petra.plan.timetable import Op
from petra.transport.edge import posted_receives

WireModel = Literal["edge", "lockstep"]
"""Name of the transport whose rules messages follow."""
Edge = tuple[Op, int]
"""One direction of a boundary: (kind of step that sends, index of the boundary)."""


class Wires(Protocol):
    """All messages of a simulated pipeline. Times are in seconds from the start of the simulation."""

    def send(self, edge: Edge, now: float, nbytes: int, route: tuple[int, int]) -> float:
        """Send a message from the first process of ``route`` to the second. Return when the sender can continue."""

    def receive(self, edge: Edge, now: float) -> float:
        """Return the arrival time of the next message, which the receiver needs from ``now`` on."""

    def exchange(self, clock: Sequence[float]) -> list[tuple[int, float]]:
        """End a round. Return the processes that have to wait, each with the time until which it waits.

        Args:
            clock: Current time of each process.
        """


def make_wires(model: WireModel, links: Mapping[Edge, Link], boundary_delays: Sequence[int]) -> Wires:
    """Return the wires of a pipeline, given the link of each edge between two processes."""
    return EdgeWires(links, boundary_delays) if model == "edge" else LockstepWires(links)


@dataclass
class _Wire:
    """Messages of one edge. They are transferred one after the other.

    A sender learns by a notice that a receive has been posted, as in gloo and NCCL. So if both are posted at the same time, the
    message arrives after twice the latency.

    Attributes:
        link: Link of the messages.
        notice: Seconds that the notice of a receive travels: the latency of the other direction.
        free_from: When the last byte has left the sender.
    """

    link: Link
    notice: float
    free_from: float = 0.0

    def transfer(self, sent: float, posted: float, nbytes: int) -> float:
        """Transfer a message whose send and receive are posted at these times. Return when the message arrives."""
        self.free_from = max(self.free_from, sent, posted + self.notice) + nbytes / self.link.bandwidth
        return self.free_from + self.link.latency


def _make_wires(links: Mapping[Edge, Link]) -> dict[Edge, _Wire]:
    other = {Op.FORWARD: Op.BACKWARD, Op.BACKWARD: Op.FORWARD}
    return {(op, boundary): _Wire(link, links[other[op], boundary].latency) for (op, boundary), link in links.items()}


class EdgeWires:
    """Messages of the edge transport.

    A transfer starts when the sender knows that its receive has been posted. A sender with d + 1 pending messages waits until the
    oldest has left.
    """

    def __init__(self, links: Mapping[Edge, Link], boundary_delays: Sequence[int]) -> None:
        self._capacity = {(op, j): boundary_delays[j] + 1 for op, j in links}
        self._posted = {(op, j): posted_receives(boundary_delays[j]) for op, j in links}
        self._wires = _make_wires(links)
        self._sent: dict[Edge, list[tuple[float, int]]] = {edge: [] for edge in links}
        self._left: dict[Edge, list[float]] = {edge: [] for edge in links}
        self._arrived: dict[Edge, list[float]] = {edge: [] for edge in links}
        self._received: dict[Edge, list[float]] = {edge: [] for edge in links}

    def send(self, edge: Edge, now: float, nbytes: int, route: tuple[int, int]) -> float:
        sent = self._sent[edge]
        oldest = len(sent) - self._capacity[edge]
        if oldest >= 0:
            self._compute_arrivals(edge, oldest)
            now = max(now, self._left[edge][oldest])
        sent.append((now, nbytes))
        return now

    def receive(self, edge: Edge, now: float) -> float:
        m = len(self._received[edge])
        self._compute_arrivals(edge, m)
        arrival = self._arrived[edge][m]
        self._received[edge].append(max(now, arrival))
        return arrival

    def exchange(self, clock: Sequence[float]) -> list[tuple[int, float]]:
        return []

    def _compute_arrivals(self, edge: Edge, last: int) -> None:
        """Compute the arrival times of the messages up to number ``last``.

        If n receives are posted in advance, that of message i is posted when message i − n has been received. The timetable
        guarantees that this has happened.
        """
        arrived, received, ahead = self._arrived[edge], self._received[edge], self._posted[edge]
        for i in range(len(arrived), last + 1):
            sent, nbytes = self._sent[edge][i]
            posted = received[i - ahead] if i >= ahead else 0.0
            arrived.append(self._wires[edge].transfer(sent, posted, nbytes))
            self._left[edge].append(self._wires[edge].free_from)


class LockstepWires:
    """Messages of the lockstep transport.

    After each round, the two ends of a boundary post their messages together. Each sender then waits until what it sent in the
    round before has left.
    """

    def __init__(self, links: Mapping[Edge, Link]) -> None:
        self._wires = _make_wires(links)
        self._round: list[tuple[Edge, int, tuple[int, int]]] = []
        self._arrived: dict[Edge, deque[float]] = {edge: deque() for edge in self._wires}
        self._last_left: dict[int, float] = {}  # for each process, of the messages that it sent in its last exchange

    def send(self, edge: Edge, now: float, nbytes: int, route: tuple[int, int]) -> float:
        self._round.append((edge, nbytes, route))
        return now

    def receive(self, edge: Edge, now: float) -> float:
        return self._arrived[edge].popleft()

    def exchange(self, clock: Sequence[float]) -> list[tuple[int, float]]:
        taking_part = sorted({process for _, _, route in self._round for process in route})
        waits = [(process, self._last_left.pop(process)) for process in taking_part if process in self._last_left]
        for edge, nbytes, (sender, receiver) in self._round:
            wire = self._wires[edge]
            self._arrived[edge].append(wire.transfer(clock[sender], clock[receiver], nbytes))
            self._last_left[sender] = max(self._last_left.get(sender, 0.0), wire.free_from)
        self._round.clear()
        return waits
