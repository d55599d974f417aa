"""Predicts period, bubble, staleness and memory of a pipeline from the schedule that the engine runs, or simulates a run of it."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from petra.cost_model.costs import StageCost
from petra.cost_model.event_graph import event_graph
from petra.cost_model.links import INSTANT, Connection, Link, connections
from petra.cost_model.period import maximum_cycle_ratio
from petra.cost_model.steps import steady_state
from petra.cost_model.wires import Edge, WireModel, Wires, make_wires
from petra.cost_model.zero_bubble import ZeroBubble, lags, splits
from petra.diagnostics.events import Interval, Kind
from petra.method import Method
from petra.plan.overlap import overlapped_stages
from petra.plan.timetable import Op, Step, Timetable, in_flight


@dataclass(frozen=True)
class Prediction:
    """A pipeline in its steady state. Lists have one entry per stage.

    Attributes:
        period: Seconds per microbatch.
        compute: Seconds per microbatch that the busiest process computes; a lower bound of the period.
        bubble: Fraction of the period in which the process of the stage is idle.
        in_flight: Largest number of microbatches between forward and backward.
        staleness: Average number of updates between forward and backward of a microbatch.
    """

    period: float
    compute: float
    bubble: list[float]
    in_flight: list[int]
    staleness: list[float]

    @property
    def efficiency(self) -> float:
        """Fraction of the period in which the busiest process computes."""
        return self.compute / self.period


def predict(
    costs: Sequence[StageCost],
    method: Method,
    k: int = 1,
    *,
    processes: Sequence[range] | None = None,
    link: Link | Sequence[Connection] = INSTANT,
    transport: WireModel = "edge",
    overlap: bool = False,
) -> Prediction:
    """Predict the steady state of a pipeline trained by ``method``. A process runs one step at a time, or two with ``overlap``.

    The period is the one that a long simulation approaches, computed without simulating (:mod:`petra.cost_model.period`).

    Args:
        costs: Cost of each stage.
        k: Microbatches per update.
        processes: Stages of each process; None for one stage per process.
        link: Link between neighbouring processes, the same everywhere; or the connection of each process to the next one.
        transport: Transport whose rules the messages follow.
        overlap: Whether stages run forward beside backward where they can (:mod:`petra.plan.overlap`), at no loss of speed.

    Raises:
        ConfigError: If the method's delays don't fit the number of stages.
    """
    stages = len(costs)
    processes = processes or [range(j, j + 1) for j in range(stages)]
    delays, boundary_delays = method.delays(stages, k), method.boundary_delays(stages - 1)[: stages - 1]
    steady = steady_state(delays, boundary_delays, k if method.flush else None)
    if any(cost.update for cost in costs):
        steady = steady.repeated(k // steady.microbatches)
    neighbours = connections(link, len(processes))
    postponed = lags(method, delays)
    beside = overlapped_stages(boundary_delays) if overlap and not isinstance(method, ZeroBubble) else ()
    parts = splits(method, stages), postponed
    graph = event_graph(steady, costs, k, processes, neighbours, boundary_delays, transport, *parts, beside)
    period = maximum_cycle_ratio(graph) / steady.microbatches
    compute = [_busy_seconds(costs, k, process, set(process).intersection(beside)) for process in processes]
    return Prediction(
        period=period,
        compute=max(compute),
        bubble=[1 - busy / period for process, busy in zip(processes, compute, strict=True) for _ in process],
        in_flight=[in_flight(delay + lag, k, method.flush) for delay, lag in zip(delays, postponed, strict=True)],
        staleness=[method.staleness(delay, k) for delay in delays],
    )


def _busy_seconds(costs: Sequence[StageCost], k: int, process: range, beside: set[int]) -> float:
    """Return the seconds per microbatch that a process computes in the thread that computes longer."""
    main = sum(costs[j].forward + costs[j].update / k + (0.0 if j in beside else costs[j].backward) for j in process)
    other = sum(costs[j].backward for j in beside)
    return max(main, other, *(costs[j].backward + costs[j].update / k for j in beside))


def simulate(
    costs: Sequence[StageCost],
    method: Method,
    k: int,
    microbatches: int,
    *,
    processes: Sequence[range] | None = None,
    link: Link | Sequence[Connection] = INSTANT,
    transport: WireModel = "edge",
    overlap: bool = False,
) -> list[Interval]:
    """Simulate the training of ``microbatches`` microbatches, from an empty pipeline until it has drained.

    As in :class:`petra.Pipeline`, each process runs its stages' part of the timetable step by step. Messages between processes
    follow the rules of the transport. For the arguments, see :func:`predict`.

    Returns:
        What each stage does in each interval of time. Intervals of zero length are left out.
    """
    stages = len(costs)
    boundary_delays = method.boundary_delays(stages - 1)[: stages - 1]
    delays = method.delays(stages, k)
    processes = processes or [range(j, j + 1) for j in range(stages)]
    wires = make_wires(transport, _edge_links(processes, link), boundary_delays)
    beside = overlapped_stages(boundary_delays) if overlap and not isinstance(method, ZeroBubble) else ()
    simulation = _Simulation(costs, k, processes, wires, splits(method, stages), lags(method, delays), beside)
    for round_ in Timetable(delays, boundary_delays, 0, microbatches, k if method.flush else None):
        for step in round_.steps():
            simulation.run(step)
        simulation.end_round()
    simulation.drain()
    return simulation.intervals


def _edge_links(processes: Sequence[range], link: Link | Sequence[Connection]) -> dict[Edge, Link]:
    """Return the link of each edge between two processes."""
    links: dict[Edge, Link] = {}
    for stages, connection in zip(processes, connections(link, len(processes)), strict=False):
        links[Op.FORWARD, stages[-1]], links[Op.BACKWARD, stages[-1]] = connection.forward, connection.backward
    return links


class _Simulation:
    """State of a simulated pipeline: the time on each process's clock and the intervals so far."""

    def __init__(
        self,
        costs: Sequence[StageCost],
        k: int,
        processes: Sequence[range],
        wires: Wires,
        splits: Sequence[bool],
        lags: Sequence[int],
        overlapped: Sequence[int],
    ) -> None:
        self._costs, self._k, self._processes, self._wires = costs, k, processes, wires
        self._splits, self._lags, self._overlapped = splits, lags, frozenset(overlapped)
        self._round_start = [(-1, 0.0)] * len(processes)  # number of the round, and the process's clock when it started
        self._forward = [(-2, 0.0)] * len(costs)  # the same of the round of each stage's last forward
        self._free_from = [0.0] * len(processes)  # when the thread for backwards beside forwards is idle
        self._due: list[tuple[int, int]] = []  # stages and microbatches whose split backward has had its first part in this round
        self._unfinished = [deque[int]() for _ in costs]
        self._owner = [p for p, stages in enumerate(processes) for _ in stages]
        self._clock = [0.0] * len(processes)
        self.intervals: list[Interval] = []

    def run(self, step: Step) -> None:
        """Receive the step's input, compute, send the output, and update the parameters if the step ends an update."""
        round_, stage, op, m = step
        cost, process = self._costs[stage], self._owner[stage]
        if self._round_start[process][0] != round_:
            self._round_start[process] = round_, self._clock[process]
        if op is Op.FORWARD:
            self._forward[stage] = self._round_start[process]
        if op is Op.FORWARD:
            source, target, kind, seconds, nbytes = stage - 1, stage + 1, Kind.FORWARD, cost.forward, cost.forward_bytes
        else:
            source, target, kind, seconds, nbytes = stage + 1, stage - 1, Kind.BACKWARD, cost.backward, cost.backward_bytes
            seconds -= cost.weights if self._splits[stage] else 0.0
        forward_round, start = self._forward[stage]
        if op is Op.BACKWARD and stage in self._overlapped and forward_round == round_ - 1:
            self._run_beside(step, start)
        else:
            if self._is_remote(source, process):
                arrival = self._wires.receive((op, min(stage, source)), self._clock[process])
                self._occupy(stage, Kind.WAIT, m, arrival, source)
            self._occupy(stage, kind, m, self._clock[process] + seconds)
        if self._is_remote(target, process):
            route = (process, self._owner[target])
            sent = self._wires.send((op, min(stage, target)), self._clock[process], nbytes, route)
            self._occupy(stage, Kind.SEND, m, sent, target)
        if op is Op.BACKWARD and self._splits[stage]:
            self._unfinished[stage].append(m)
            self._due.append((stage, m))
        elif op is Op.BACKWARD:
            self._update(stage, m)

    def _run_beside(self, step: Step, start: float) -> None:
        """Receive and compute in the process's other thread, from ``start`` on. Then the process waits for this thread."""
        _, stage, op, m = step
        process = self._owner[stage]
        start = max(start, self._free_from[process])
        if self._is_remote(stage + 1, process):
            start = max(start, self._wires.receive((op, stage), start))
        self._free_from[process] = stop = start + self._costs[stage].backward
        if stop > start:
            self.intervals.append(Interval(stage, Kind.BACKWARD, m, start, stop))
        self._clock[process] = max(self._clock[process], stop)

    def end_round(self) -> None:
        """Exchange the messages of a round, if the transport works in rounds, and run the second parts that are due."""
        for process, until in self._wires.exchange(self._clock):
            self._occupy(self._processes[process][-1], Kind.SEND, -1, until)
        for stage, m in self._due:
            self._finish(stage, m if (m + 1) % self._k == 0 else m - self._lags[stage])
        self._due.clear()

    def drain(self) -> None:
        """Run all second parts that are left."""
        for stage, unfinished in enumerate(self._unfinished):
            if unfinished:
                self._finish(stage, unfinished[-1])

    def _finish(self, stage: int, last: int) -> None:
        """Run the second parts of the microbatches up to ``last``."""
        unfinished = self._unfinished[stage]
        while unfinished and unfinished[0] <= last:
            m = unfinished.popleft()
            self._occupy(stage, Kind.BACKWARD_WEIGHTS, m, self._clock[self._owner[stage]] + self._costs[stage].weights)
            self._update(stage, m)

    def _update(self, stage: int, m: int) -> None:
        if (m + 1) % self._k == 0:
            self._occupy(stage, Kind.UPDATE, m, self._clock[self._owner[stage]] + self._costs[stage].update)

    def _is_remote(self, stage: int, process: int) -> bool:
        """Return whether the stage exists and belongs to another process."""
        return 0 <= stage < len(self._owner) and self._owner[stage] != process

    def _occupy(self, stage: int, kind: Kind, m: int, until: float, peer: int | None = None) -> None:
        """Keep the stage's process busy until the given time."""
        process = self._owner[stage]
        now = self._clock[process]
        if until > now:
            self.intervals.append(Interval(stage, kind, m, now, until, peer))
            self._clock[process] = until
