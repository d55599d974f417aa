"""Period of a pipeline in its steady state: the maximum cycle ratio of the schedule's event graph.

An event is the start or the end of a step, or the end of a transfer. In the steady state, event i of repetition n happens at ::

    x_i(n) = max over its edges (j → i, seconds w, repetitions t) of x_j(n − t) + w

which is linear in the max-plus algebra. All x grow by the same amount per repetition: the largest ratio Σw / Σt of a cycle
(Baccelli et al. 1992, Synchronization and Linearity, theorem 3.23). Howard's policy iteration computes it (Cochet-Terrasson et al.
1998, Numerical computation of spectral elements in max-plus algebra).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from graphlib import TopologicalSorter
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_matrix
from scipy.sparse.csgraph import breadth_first_order

Indices = NDArray[np.int64]
Values = NDArray[np.float64]
Edges = tuple[Indices, Indices, Values, Indices]
"""Arrays of sources, targets, seconds and repetitions."""
RELATIVE_ERROR = 1e-12
"""Ratios that differ by less are equal."""
FIRST_PASSES, STEP_COST = 3, 50
"""Work between two evaluations, in passes over all events; doubled each time that the second one finds no larger ratio. A step
costs as much as some events, besides those that it looks at."""
SMALLEST_PHASE, SIMULATED = 8, 4
"""Events per phase, on average, from which on it pays to simulate phase by phase, and repetitions simulated if phases are large."""


@dataclass(frozen=True)
class EventGraph:
    """Events and the edges that they wait for, as arrays of shape (edges per event, events).

    Attributes:
        sources: Events that an event waits for.
        seconds: Time from the source until the event can happen. Minus infinity for edges that fill up the array.
        repetitions: Number of repetitions by which the source is earlier than the event.
        phase: Part of the repetition in which each event happens, an integer. Most edges of one repetition lead to later phases.
    """

    sources: Indices
    seconds: Values
    repetitions: Indices
    phase: Indices

    @staticmethod
    def of(phase: Indices, edges: Sequence[Edges]) -> EventGraph:
        """Return the graph of all ``edges``, given the phase of each event. Each event must be the target of one edge at least."""
        events = len(phase)
        sources, targets, seconds, repetitions = (np.concatenate(parts) for parts in zip(*edges, strict=True))
        order = np.argsort(targets, kind="stable")
        targets = targets[order]
        slot = np.arange(len(targets)) - np.searchsorted(targets, targets)
        shape = (int(slot.max()) + 1, events)
        graph = EventGraph(np.tile(np.arange(events), (shape[0], 1)), np.full(shape, -np.inf), np.zeros(shape, np.int64), phase)
        graph.sources[slot, targets] = sources[order]
        graph.seconds[slot, targets] = seconds[order]
        graph.repetitions[slot, targets] = repetitions[order]
        return graph

    @cached_property
    def exists(self) -> NDArray[np.bool_]:
        """Whether each entry of the arrays is an edge."""
        return np.isfinite(self.seconds)


@dataclass(frozen=True)
class _Policy:
    """One edge for each event, and what follows from it.

    Attributes:
        chosen: Index of the edge of each event.
        root: An event of the cycle that the chosen edges lead to from each event, backwards in time.
        ratio: Ratio of that cycle, for each event.
        value: Time of each event relative to its root, if all events happen once in ``ratio``.
    """

    chosen: Indices
    root: Indices
    ratio: Values
    value: Values


def maximum_cycle_ratio(graph: EventGraph) -> float:
    """Return the largest ratio of seconds to repetitions of the cycles of a strongly connected graph.

    Policy iteration: choose one edge for each event, evaluate the cycles that these edges form, and change choices that another
    edge improves, until there are none. Changes spread from event to event at the best ratio so far. If they do not settle, the
    choices are evaluated again, which finds a cycle with a larger ratio if there is one.
    """
    outgoing = _outgoing(graph)
    policy = _evaluate(graph, _first_choice(graph))
    policy = _reach_best(graph, policy, policy.root != policy.root[policy.ratio.argmax()])
    passes = FIRST_PASSES
    while not _relax(graph, outgoing, policy, passes):
        ratio = policy.ratio.max()
        policy = _evaluate(graph, policy.chosen)
        policy = _reach_best(graph, policy, policy.ratio < policy.ratio.max() * (1 - RELATIVE_ERROR))
        passes = FIRST_PASSES if policy.ratio.max() > ratio * (1 + RELATIVE_ERROR) else 2 * passes
    return float(policy.ratio.max())


def longest_paths(graph: EventGraph) -> Values:
    """Return the time of each event of a single repetition, before which all others have happened at time 0.

    Raises:
        graphlib.CycleError: If events wait for each other.
    """
    slots, targets = np.nonzero(graph.exists)
    edges = zip(
        targets.tolist(), *(x[slots, targets].tolist() for x in (graph.sources, graph.seconds, graph.repetitions)), strict=True
    )
    waits: list[list[tuple[int, float]]] = [[] for _ in graph.phase]
    times = [0.0] * len(graph.phase)
    for target, source, seconds, repetitions in edges:
        if repetitions:
            times[target] = max(times[target], seconds)
        else:
            waits[target].append((source, seconds))
    for event in TopologicalSorter({target: [source for source, _ in edges] for target, edges in enumerate(waits)}).static_order():
        times[event] = max([times[event], *(times[source] + seconds for source, seconds in waits[event])])
    return np.array(times)


def _first_choice(graph: EventGraph) -> Indices:
    """Choose the edge that each event waits for longest in a pipeline that starts.

    If phases are large, the first repetitions are simulated phase by phase. Otherwise each event waits for the latest phase.
    """
    order = np.argsort(graph.phase, kind="stable")
    starts = np.flatnonzero(np.diff(graph.phase[order], prepend=-1))
    if SMALLEST_PHASE * len(starts) > len(order):
        latest = graph.phase[graph.sources] - 2 * graph.repetitions * (graph.phase.max() + 1)
        among_equals = graph.seconds / (2 * graph.seconds.max() or 1.0)
        chosen: Indices = np.where(graph.exists, latest + among_equals, -np.inf).argmax(0)
        return chosen
    chosen, place = np.empty_like(order), np.empty_like(order)
    place[order] = np.arange(len(order))
    sources, seconds, repetitions = place[graph.sources[:, order]], graph.seconds[:, order], graph.repetitions[:, order]
    phases = list(pairwise([*starts.tolist(), len(order)]))
    long_ago = seconds.max() * seconds.size
    now, before = np.zeros(len(order)), np.full(len(order), -long_ago)  # times in this repetition and in the one before
    for _ in range(SIMULATED if STEP_COST * len(phases) <= len(order) else 1):
        earlier = np.where(repetitions > 0, before[sources] - long_ago * (repetitions - 1) + seconds, -np.inf)
        within = np.where(repetitions > 0, -np.inf, seconds)
        for start, end in phases:
            times = np.maximum(now[sources[:, start:end]] + within[:, start:end], earlier[:, start:end])
            chosen[start:end], now[start:end] = times.argmax(0), times.max(0)
        before = now.copy()
    chosen[order] = chosen.copy()
    return chosen


def _relax(graph: EventGraph, outgoing: Indices, policy: _Policy, passes: int) -> bool:
    """Improve choices and values in place, at the best ratio. Return whether they have settled."""
    chosen, value, ratio = policy.chosen, policy.value, policy.ratio.max()
    tolerance = 1e-13 * max(np.abs(value).max(), ratio)
    weights = graph.seconds - ratio * graph.repetitions
    events, left, waiting = np.arange(len(value)), passes * len(value), np.zeros(len(value), bool)
    while left > 0:
        left -= len(events) + STEP_COST
        times = weights[:, events] + value[graph.sources[:, events]]
        best = times.argmax(0)
        latest = times[best, np.arange(len(events))]
        later = latest > value[events] + tolerance
        improved = events[later]
        if not len(improved):
            return True
        chosen[improved], value[improved] = best[later], latest[later]
        waiting[outgoing[:, improved]] = True
        events = np.flatnonzero(waiting)
        waiting[events] = False
    return False


def _outgoing(graph: EventGraph) -> Indices:
    """Return the events that wait for each event, as an array that is filled up with the event itself."""
    slots, targets = np.nonzero(graph.exists)
    sources = graph.sources[slots, targets]
    order = np.argsort(sources, kind="stable")
    sources, targets = sources[order], targets[order]
    slot = np.arange(len(sources)) - np.searchsorted(sources, sources)
    outgoing = np.tile(np.arange(graph.sources.shape[1]), (int(slot.max()) + 1, 1))
    outgoing[slot, sources] = targets
    return outgoing


def _reach_best(graph: EventGraph, policy: _Policy, others: NDArray[np.bool_]) -> _Policy:
    """Lead ``others`` to the cycle with the best ratio, along the path with the fewest edges."""
    if not others.any():
        return policy
    events = len(policy.chosen)
    slots, targets = np.nonzero(graph.exists)
    sources = graph.sources[slots, targets]
    edges = csr_matrix((np.ones(len(sources)), (sources, targets)), (events, events))
    _, before = breadth_first_order(edges, int(policy.ratio.argmax()))
    along = (graph.exists & (graph.sources == before)).argmax(0)
    return _evaluate(graph, np.where(others, along, policy.chosen))


def _evaluate(graph: EventGraph, chosen: Indices) -> _Policy:
    """Evaluate one edge for each event: paths of all lengths by doubling, for all events at once."""
    events = np.arange(len(chosen))
    source, seconds, repetitions = (part[chosen, events] for part in (graph.sources, graph.seconds, graph.repetitions))
    doublings = len(events).bit_length()
    end, first = source, np.minimum(events, source)  # end of a path of 2^l edges, and the smallest event on it
    for _ in range(doublings):
        first, end = np.minimum(first, first[end]), end[end]
    root = first[end]  # the smallest event of the cycle that a path ends in
    end, roots = source.copy(), np.unique(root)
    total, count = seconds.copy(), repetitions.copy()  # of the path to the root
    end[roots], total[roots], count[roots] = roots, 0.0, 0
    for _ in range(doublings):
        total, count, end = total + total[end], count + count[end], end[end]
    ratio = (seconds[root] + total[source[root]]) / (repetitions[root] + count[source[root]])
    value = total - ratio * count
    return _Policy(chosen, root, ratio, value)
