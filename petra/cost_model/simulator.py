"""Predicted period, bubble, staleness and memory of a pipeline, from the schedules that the engine runs; nothing is executed."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal, Protocol

from petra.diagnostics.events import Interval, Kind
from petra.method import Method
from petra.plan.schedule import Op, in_flight, timetable, training_orders

_POSTED = 2  # receives that the edge transport posts ahead


@dataclass(frozen=True)
class StageCost:
    """One stage's work for one microbatch.

    Attributes:
        forward, backward: seconds; backward includes recomputation.
        update: seconds of one update.
        forward_bytes, backward_bytes: of the messages to the next stage and to the one before.
        held_bytes: held of a microbatch between F and B.
        fixed_bytes: held all the time (weights, gradients, optimizer) or during a backward.
    """

    forward: float
    backward: float
    update: float = 0.0
    forward_bytes: int = 0
    backward_bytes: int = 0
    held_bytes: int = 0
    fixed_bytes: int = 0


@dataclass(frozen=True)
class Link:
    """One direction between two processes: bytes a second, and seconds before the first byte."""

    bandwidth: float = float("inf")
    latency: float = 0.0


@dataclass(frozen=True)
class Prediction:
    """A pipeline in its steady state; seconds are for one microbatch, lists have an entry for each stage."""

    period: float
    compute: float
    """Of the process that has most of it: the period can't be shorter."""
    bubble: list[float]
    """Part of the period in which the stage's process computes nothing."""
    in_flight: list[int]
    """Microbatches between F and B at most."""
    staleness: list[float]
    """Updates between a microbatch's F and its B, on average."""
    memory: list[int]
    """Bytes."""

    @property
    def efficiency(self) -> float:
        return self.compute / self.period


def predict(
    costs: Sequence[StageCost],
    method: Method,
    k: int = 1,
    *,
    processes: Sequence[range] | None = None,
    link: Link = Link(),
    transport: Literal["edge", "lockstep"] = "edge",
) -> Prediction:
    """The steady state of ``method`` in lines whose processes have one compute resource each.

    Args:
        processes: for each process its stages; None for one stage each.

    Raises:
        ConfigError: delays that don't fit the stages.
    """
    stages = len(costs)
    processes = processes or [range(j, j + 1) for j in range(stages)]
    delays = method.delays(stages, k)
    ahead = max(delays) + 2 * stages
    measured = k * -(-2 * ahead // k)
    before = measured if method.flush else ahead
    end = before + measured  # microbatches that the first stage has taken back while it still sends others
    total = end if method.flush else end + max(delays)
    intervals = simulate(costs, method, k, total, processes=processes, link=link, transport=transport)
    done = {i.microbatch: i.stop for i in intervals if i.stage == 0 and i.kind in (Kind.BACKWARD, Kind.UPDATE)}
    period = _period([done[m] for m in range(before - 1, end)], k)
    compute = [sum(costs[j].forward + costs[j].backward + costs[j].update / k for j in process) for process in processes]
    held = [in_flight(delay, k, method.flush) for delay in delays]
    return Prediction(
        period=period,
        compute=max(compute),
        bubble=[1 - busy / period for process, busy in zip(processes, compute, strict=True) for _ in process],
        in_flight=held,
        staleness=[method.staleness(delay, k) for delay in delays],
        memory=[cost.fixed_bytes + n * cost.held_bytes for cost, n in zip(costs, held, strict=True)],
    )


def _period(done: Sequence[float], k: int) -> float:
    """Of the shortest cycle, in multiples of k microbatches, with which these times go on; else their mean difference."""
    half = len(done) // 2
    for cycle in range(k, half + 1, k):
        steps = [done[-n] - done[-n - cycle] for n in range(1, half + 1)]
        if max(steps) - min(steps) <= 1e-9 * done[-1]:
            return steps[0] / cycle
    return (done[-1] - done[0]) / (len(done) - 1)


def simulate(
    costs: Sequence[StageCost],
    method: Method,
    k: int,
    microbatches: int,
    *,
    processes: Sequence[range] | None = None,
    link: Link = Link(),
    transport: Literal["edge", "lockstep"] = "edge",
) -> list[Interval]:
    """Every stage's work on ``microbatches`` from a standing start to the drained pipeline.

    Each process walks its stages' part of the timetable, one step after the other, as :class:`petra.Pipeline` does; messages
    between processes travel by the rules of the transport.
    """
    stages = len(costs)
    processes = processes or [range(j, j + 1) for j in range(stages)]
    owner = [p for p, held in enumerate(processes) for _ in held]
    boundaries = method.boundary_delays(stages - 1)[: stages - 1]
    orders = training_orders(method.delays(stages, k), 0, microbatches, k if method.flush else None)
    clock = [0.0] * len(processes)
    wires: _Wires = (_EdgeWires if transport == "edge" else _LockstepWires)(link, boundaries)
    found: list[Interval] = []

    def spend(stage: int, kind: Kind, m: int, until: float, peer: int | None = None) -> None:
        """The stage's process is busy with this until then."""
        now = clock[owner[stage]]
        if until > now:
            found.append(Interval(stage, kind, m, now, until, peer))
            clock[owner[stage]] = until

    for _, round_ in groupby(timetable(orders, boundaries), key=lambda step: step.round):
        for step in round_:
            stage, m, cost = step.stage, step.microbatch, costs[step.stage]
            process, source, target = owner[stage], stage - 1, stage + 1
            kind, seconds, nbytes = Kind.FORWARD, cost.forward, cost.forward_bytes
            if step.op is Op.BACKWARD:
                source, target, kind, seconds, nbytes = target, source, Kind.BACKWARD, cost.backward, cost.backward_bytes
            if 0 <= source < stages and owner[source] != process:
                spend(stage, Kind.WAIT, m, wires.take((step.op, min(stage, source)), clock[process]), source)
            spend(stage, kind, m, clock[process] + seconds)
            if 0 <= target < stages and owner[target] != process:
                route = (process, owner[target])
                spend(stage, Kind.SEND, m, wires.send((step.op, min(stage, target)), clock[process], nbytes, route), target)
            if step.op is Op.BACKWARD and (m + 1) % k == 0:
                spend(stage, Kind.UPDATE, m, clock[process] + cost.update)
        for process, until in wires.exchange(clock):
            spend(processes[process][-1], Kind.SEND, -1, until)
    return found


Edge = tuple[Op, int]
"""One direction of a boundary."""


class _Wires(Protocol):
    def send(self, edge: Edge, now: float, nbytes: int, route: tuple[int, int]) -> float:
        """A message leaves a process of ``route`` for the other; returns when the sender goes on."""

    def take(self, edge: Edge, now: float) -> float:
        """When the next message, which its receiver wants from now on, has arrived."""

    def exchange(self, clock: Sequence[float]) -> list[tuple[int, float]]:
        """The end of a round: which processes must wait, and until when."""


@dataclass
class _Wire:
    """Messages of one direction, one after the other."""

    link: Link
    free: float = 0.0

    def transfer(self, earliest: float, nbytes: int) -> float:
        self.free = max(self.free, earliest) + nbytes / self.link.bandwidth
        return self.free + self.link.latency


class _EdgeWires:
    """A transfer begins when its receive is posted; a sender with d + 1 messages under way waits for the oldest."""

    def __init__(self, link: Link, boundary_delays: Sequence[int]) -> None:
        edges = [(op, j) for op in Op for j in range(len(boundary_delays))]
        self._capacity = {(op, j): boundary_delays[j] + 1 for op, j in edges}
        self._wires = {edge: _Wire(link) for edge in edges}
        self._sent: dict[Edge, list[tuple[float, int]]] = {edge: [] for edge in edges}
        self._arrived: dict[Edge, list[float]] = {edge: [] for edge in edges}
        self._taken: dict[Edge, list[float]] = {edge: [] for edge in edges}

    def send(self, edge: Edge, now: float, nbytes: int, route: tuple[int, int]) -> float:
        sent = self._sent[edge]
        oldest = len(sent) - self._capacity[edge]
        if oldest >= 0:
            self._arrive(edge, oldest)
            now = max(now, self._arrived[edge][oldest])
        sent.append((now, nbytes))
        return now

    def take(self, edge: Edge, now: float) -> float:
        m = len(self._taken[edge])
        self._arrive(edge, m)
        arrival = self._arrived[edge][m]
        self._taken[edge].append(max(now, arrival))
        return arrival

    def exchange(self, clock: Sequence[float]) -> list[tuple[int, float]]:
        return []

    def _arrive(self, edge: Edge, last: int) -> None:
        """When the messages up to ``last`` arrive; those _POSTED before them have been taken, as the timetable has it."""
        arrived, taken = self._arrived[edge], self._taken[edge]
        for i in range(len(arrived), last + 1):
            sent, nbytes = self._sent[edge][i]
            posted = taken[i - _POSTED] if i >= _POSTED else 0.0
            arrived.append(self._wires[edge].transfer(max(sent, posted), nbytes))


class _LockstepWires:
    """After a round both ends post what crosses their boundary, then wait until what they sent before has arrived."""

    def __init__(self, link: Link, boundary_delays: Sequence[int]) -> None:
        self._wires = {(op, j): _Wire(link) for op in Op for j in range(len(boundary_delays))}
        self._round: list[tuple[Edge, int, tuple[int, int]]] = []
        self._arrived: dict[Edge, deque[float]] = {edge: deque() for edge in self._wires}
        self._sent: dict[int, float] = {}

    def send(self, edge: Edge, now: float, nbytes: int, route: tuple[int, int]) -> float:
        self._round.append((edge, nbytes, route))
        return now

    def take(self, edge: Edge, now: float) -> float:
        return self._arrived[edge].popleft()

    def exchange(self, clock: Sequence[float]) -> list[tuple[int, float]]:
        waits = [(p, self._sent.pop(p)) for p in sorted({p for _, _, route in self._round for p in route}) if p in self._sent]
        for edge, nbytes, (sender, receiver) in self._round:
            arrival = self._wires[edge].transfer(max(clock[sender], clock[receiver]), nbytes)
            self._arrived[edge].append(arrival)
            self._sent[sender] = max(self._sent.get(sender, 0.0), arrival)
        self._round.clear()
        return waits
