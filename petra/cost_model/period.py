"""Times of events that wait for each other: of one run, and the period in which they repeat, the maximum cycle ratio.

An event is the start or the end of a step, or the end of a transfer. In the steady state, event i of repetition n happens at ::

    x_i(n) = max over its edges (j → i, seconds w, repetitions t) of x_j(n − t) + w

which is linear in the max-plus algebra. All x grow by the same amount per repetition: the largest ratio Σw / Σt of a cycle
(Baccelli et al. 1992, Synchronization and Linearity, theorem 3.23).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]
Values = NDArray[np.float64]
Edge = tuple[int, int, float, int]
"""Target, source, seconds, and number of repetitions by which the source is earlier."""
RELATIVE_ERROR = 1e-11
"""Ratios that differ by less are equal."""
ROUNDING = 1e-15
"""Times that differ by less are equal, relative to the largest one."""


@dataclass(frozen=True)
class EventGraph:
    """Events in the order of their phases, and the edges that they wait for, as arrays of shape (edges per event, events).

    Attributes:
        sources: Events that an event waits for.
        seconds: Time from the source until the event can happen. Minus infinity for edges that fill up the array.
        repetitions: Number of repetitions by which the source is earlier than the event.
        phases: Slices of events. Most edges of one repetition lead to later phases.
        place: Place of each event in this order.
    """

    sources: Indices
    seconds: Values
    repetitions: Indices
    phases: Sequence[slice]
    place: Indices

    @staticmethod
    def of(phase: Sequence[tuple[int, ...]], edges: Sequence[Edge]) -> EventGraph:
        """Return the graph of all ``edges``, given a sortable phase of each event."""
        order = sorted(range(len(phase)), key=phase.__getitem__)
        place = np.empty(len(phase), np.int64)
        place[order] = np.arange(len(phase))
        changes = [i for i in range(len(order)) if i == 0 or phase[order[i]] != phase[order[i - 1]]]
        columns = [np.array(column) for column in zip(*edges, strict=True)]
        targets, sources = place[columns[0]], place[columns[1]]
        by_target = np.argsort(targets, kind="stable")
        targets = targets[by_target]
        slot = np.arange(len(targets)) - np.searchsorted(targets, targets)
        shape = (int(slot.max()) + 1, len(phase))
        found = np.zeros(shape, np.int64), np.full(shape, -np.inf), np.zeros(shape, np.int64)
        for array, values in zip(found, (sources, *columns[2:]), strict=True):
            array[slot, targets] = values[by_target]
        return EventGraph(*found, [slice(a, b) for a, b in pairwise([*changes, len(order)])], place)

    def relax(self, value: Values, chosen: Indices, ratio: float, tolerance: float) -> bool:
        """Delay events until their edges, phase by phase, where one repetition takes ``ratio``. Return whether any was late.

        Args:
            value: Time of each event, relative to its repetition. Changed in place.
            chosen: Edge that each event waits for. Changed in place.
        """
        late = False
        weights = self.seconds - ratio * self.repetitions
        for phase in self.phases:
            times = value[self.sources[:, phase]] + weights[:, phase]
            best = times.argmax(0)
            latest = times[best, np.arange(len(best))]
            improved = latest > value[phase] + tolerance
            if improved.any():
                late = True
                value[phase] = np.where(improved, latest, value[phase])
                chosen[phase] = np.where(improved, best, chosen[phase])
        return late


def maximum_cycle_ratio(graph: EventGraph, at_least: float) -> float:
    """Return the largest ratio of seconds to repetitions of the cycles of a graph.

    If events can repeat in a time, that is, if delays settle, no cycle has a larger ratio. Otherwise, the edges that events wait
    for soon form a cycle with a larger ratio, which is tried next.

    Args:
        at_least: Ratio of one of the cycles.
    """
    value, chosen = np.zeros(len(graph.place)), np.zeros(len(graph.place), np.int64)
    ratio, passes = at_least, 1
    while passes <= 2 * len(chosen):
        tolerance = max(RELATIVE_ERROR * ratio / len(graph.phases), ROUNDING * float(value.max()))
        if not all(graph.relax(value, chosen, ratio, tolerance) for _ in range(passes)):
            break
        found = _best_cycle(graph, chosen)
        ratio, passes = (found, 1) if found > ratio * (1 + RELATIVE_ERROR) else (ratio, 2 * passes)
    return ratio


def longest_paths(graph: EventGraph) -> Values:
    """Return the time of each event of a single repetition, before which all others have happened at time 0."""
    earlier = graph.repetitions > 0
    value, chosen = np.where(earlier, graph.seconds, 0.0).max(0), np.zeros(len(graph.place), np.int64)
    once = replace(graph, seconds=np.where(earlier, -np.inf, graph.seconds))
    while once.relax(value, chosen, 0.0, 0.0):
        pass
    found: Values = value[graph.place]
    return found


def _best_cycle(graph: EventGraph, chosen: Indices) -> float:
    """Return the largest ratio of the cycles that one edge of each event forms; 0 if there is none."""
    events = np.arange(len(chosen))
    source, seconds, repetitions = (part[chosen, events].tolist() for part in (graph.sources, graph.seconds, graph.repetitions))
    best, visited = 0.0, [-1] * len(chosen)
    for first in range(len(chosen)):
        event = first
        while visited[event] < 0:
            visited[event] = first
            event = source[event]
        if visited[event] == first:
            cycle = [event]
            while (event := source[event]) != cycle[0]:
                cycle.append(event)
            if (count := sum(repetitions[i] for i in cycle)) > 0:
                best = max(best, sum(seconds[i] for i in cycle) / count)
    return best
