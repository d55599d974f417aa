"""Predicts period, bubble and staleness of a pipeline from the schedule that the engine runs, or simulates a run of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from petra.cost_model.costs import StageCost
from petra.cost_model.event_graph import END, START, Events, Pipe, TransportRules
from petra.cost_model.machines import INSTANT, Connection, Link, connections
from petra.cost_model.period import longest_paths, maximum_cycle_ratio
from petra.diagnostics.events import Interval, Kind
from petra.method import Method
from petra.plan.timetable import Op


@dataclass(frozen=True)
class Prediction:
    """A pipeline in its steady state.

    Attributes:
        period: Seconds per microbatch.
        bubble: Fraction of the period in which the process of each stage is idle.
        staleness: Average number of updates between forward and backward of a microbatch, for each stage.
    """

    period: float
    bubble: list[float]
    staleness: list[float]


def predict(
    costs: Sequence[StageCost],
    method: Method,
    k: int = 1,
    *,
    processes: Sequence[range] | None = None,
    link: Link | Sequence[Connection] = INSTANT,
    transport: TransportRules = "edge",
) -> Prediction:
    """Predict the steady state of a pipeline trained by ``method``. A process runs one step at a time.

    The period is the one that a long simulation approaches, computed without simulating (:mod:`petra.cost_model.period`).

    Args:
        costs: Cost of each stage.
        k: Microbatches per update.
        processes: Stages of each process; None for one stage per process.
        link: Link between neighbouring processes, the same everywhere; or the connection of each process to the next one.
        transport: Transport whose rules the messages follow.

    Raises:
        ConfigError: If the method's delays don't fit the number of stages.
    """
    pipe = _pipe(costs, method, k, processes, link, transport)
    steps, microbatches = pipe.steady_state()
    busy = [sum(costs[j].forward + costs[j].backward + costs[j].update / k for j in process) for process in pipe.processes]
    period = maximum_cycle_ratio(Events(steps, pipe, microbatches).graph, max(busy) * microbatches) / microbatches
    return Prediction(
        period=period,
        bubble=[1 - busy[process] / period for process in pipe.owner],
        staleness=[method.staleness(delay, k) for delay in pipe.delays],
    )


def simulate(
    costs: Sequence[StageCost],
    method: Method,
    k: int,
    microbatches: int,
    *,
    processes: Sequence[range] | None = None,
    link: Link | Sequence[Connection] = INSTANT,
    transport: TransportRules = "edge",
) -> list[Interval]:
    """Simulate the training of ``microbatches`` microbatches, from an empty pipeline until it has drained.

    Each process runs its stages' part of the timetable step by step, and messages follow the rules of the transport: the time of
    each event is the longest path to it in the event graph. For the arguments, see :func:`predict`.

    Returns:
        What each stage does in each interval of time, by start. Intervals of zero length are left out.
    """
    pipe = _pipe(costs, method, k, processes, link, transport)
    events = Events([step for round_ in pipe.timetable(microbatches) for step in round_.steps()], pipe)
    found = _intervals(events, pipe, longest_paths(events.graph).tolist())
    return sorted((i for i in found if i.stop > i.start), key=lambda i: i.start)


def _pipe(
    costs: Sequence[StageCost],
    method: Method,
    k: int,
    processes: Sequence[range] | None,
    link: Link | Sequence[Connection],
    transport: TransportRules,
) -> Pipe:
    processes = processes or [range(j, j + 1) for j in range(len(costs))]
    return Pipe(costs, method, k, processes, connections(link, len(processes)), transport)


def _intervals(events: Events, pipe: Pipe, times: Sequence[float]) -> Iterator[Interval]:
    """Yield what each stage does, given the time of each event, item by item in the order of rounds."""
    free = [0.0] * len(pipe.processes)
    for i, item in enumerate(events.items):
        process, begin, stop = item.process, times[3 * i + START], times[3 * i + END]
        if item.step is None:
            yield Interval(pipe.processes[process][-1], Kind.SEND, -1, free[process], stop)
        else:
            _, stage, op, m = item.step
            sent, forward = begin + item.compute, op is Op.FORWARD
            source, target = (stage - 1, stage + 1) if forward else (stage + 1, stage - 1)
            yield Interval(stage, Kind.WAIT, m, free[process], begin, source)
            yield Interval(stage, Kind.FORWARD if forward else Kind.BACKWARD, m, begin, sent)
            yield Interval(stage, Kind.SEND, m, sent, stop, target)
        for work in item.after:
            yield Interval(work.stage, work.kind, work.microbatch, stop, stop + work.seconds)
            stop += work.seconds
        free[process] = stop
