"""Predicts period, bubble, staleness and memory of a pipeline from the schedule that the engine runs, or simulates a run of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from petra.cost_model.costs import StageCost
from petra.cost_model.event_graph import Events, Pipe, Steps, TransportRules, steady_state
from petra.cost_model.links import INSTANT, Connection, Link, connections
from petra.cost_model.period import longest_paths, maximum_cycle_ratio
from petra.cost_model.zero_bubble import ZeroBubble, lags, splits
from petra.diagnostics.events import Interval, Kind
from petra.method import Method
from petra.plan.timetable import Op, Timetable, in_flight, overlapped_stages


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
    transport: TransportRules = "edge",
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
        overlap: Whether stages run forward beside backward where they can (``overlapped_stages``), at no loss of speed.

    Raises:
        ConfigError: If the method's delays don't fit the number of stages.
    """
    pipe = _pipe(costs, method, k, processes, link, transport, overlap=overlap)
    delays = method.delays(len(costs), k)
    multiple = k if any(cost.update for cost in costs) else 1
    steady = steady_state(delays, pipe.boundary_delays, k if method.flush else None, multiple)
    assert steady.microbatches is not None
    compute = [_busy_seconds(costs, k, process, set(process).intersection(pipe.overlapped)) for process in pipe.processes]
    graph = Events(steady, pipe).graph
    period = maximum_cycle_ratio(graph, max(compute) * steady.microbatches) / steady.microbatches
    return Prediction(
        period=period,
        compute=max(compute),
        bubble=[1 - busy / period for process, busy in zip(pipe.processes, compute, strict=True) for _ in process],
        in_flight=[in_flight(delay + lag, k, method.flush) for delay, lag in zip(delays, pipe.lags, strict=True)],
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
    transport: TransportRules = "edge",
    overlap: bool = False,
) -> list[Interval]:
    """Simulate the training of ``microbatches`` microbatches, from an empty pipeline until it has drained.

    Each process runs its stages' part of the timetable step by step, and messages follow the rules of the transport: the time of
    each event is the longest path to it in the event graph. For the arguments, see :func:`predict`.

    Returns:
        What each stage does in each interval of time, by start. Intervals of zero length are left out.
    """
    pipe = _pipe(costs, method, k, processes, link, transport, overlap=overlap)
    flush = k if method.flush else None
    timetable = Timetable(method.delays(len(costs), k), pipe.boundary_delays, 0, microbatches, flush)
    events = Events(Steps([step for round_ in timetable for step in round_.steps()]), pipe)
    found = _intervals(events, pipe, longest_paths(events.graph).tolist())
    return sorted((i for i in found if i.stop > i.start), key=lambda i: i.start)


def _pipe(
    costs: Sequence[StageCost],
    method: Method,
    k: int,
    processes: Sequence[range] | None,
    link: Link | Sequence[Connection],
    transport: TransportRules,
    *,
    overlap: bool,
) -> Pipe:
    stages = len(costs)
    processes = processes or [range(j, j + 1) for j in range(stages)]
    between = method.boundary_delays(stages - 1)[: stages - 1]
    beside = overlapped_stages(between) if overlap and not isinstance(method, ZeroBubble) else ()
    neighbours, postponed = connections(link, len(processes)), lags(method, method.delays(stages, k))
    return Pipe(costs, k, processes, neighbours, between, transport, splits(method, stages), postponed, beside)


def _intervals(events: Events, pipe: Pipe, times: Sequence[float]) -> Iterator[Interval]:
    """Yield what each stage does, given the time of each event, item by item in the order of rounds."""
    free = [0.0] * len(pipe.processes)
    for item in events.items:
        process, stop = item.process, times[item.end]
        if item.step is None:
            yield Interval(pipe.processes[process][-1], Kind.SEND, -1, free[process], stop)
        else:
            _, stage, op, m = item.step
            begin = times[item.start]
            sent, forward = begin + item.compute, op is Op.FORWARD
            source, target = (stage - 1, stage + 1) if forward else (stage + 1, stage - 1)
            if not item.beside:
                yield Interval(stage, Kind.WAIT, m, free[process], begin, source)
            yield Interval(stage, Kind.FORWARD if forward else Kind.BACKWARD, m, begin, sent)
            yield Interval(stage, Kind.SEND, m, max(free[process], sent), stop, target)
        for work in item.after:
            yield Interval(work.stage, work.kind, work.microbatch, stop, stop + work.seconds)
            stop += work.seconds
        free[process] = stop
