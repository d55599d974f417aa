"""Memory of every stage of a long pipeline, each in a process of its own, from the account of a few short pipelines.

A stage of a long pipeline differs from the same stage of a short one only in how many microbatches are in flight, and how many
versions of the weights they use. So :func:`petra.cost_model.memory.account` runs each kind of stage with its neighbours and a short
delay, and what one microbatch and one version take there is added for each further one. Only the flags of a few bytes that each
backward leaves until the next update are not.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import NamedTuple

from petra.cost_model.memory import PredictedMemory, account
from petra.engine.build import Recipe
from petra.method import Weights
from petra.plan import Plan
from petra.specs import TensorSpec

DELAY = 4
"""Least delay of a stage in a short pipeline, if its own is longer."""
EARLIER = 4
"""Earlier stages in a short pipeline, if there are as many: their delays determine when messages arrive."""
UNEQUAL = 32
"""Most stages of a pipeline with unequal delays that is not shortened. In longer ones, waiting messages are not counted exactly."""
LAG = 2
"""Lag of a stage in a short pipeline, if its own is longer."""
NEIGHBOURS = 2
"""Least number of later stages in a short pipeline, if there are as many."""
K = 8
"""k of methods with a lag is not shortened if it is at most this number."""


def predict_stages(plan: Plan, recipe: Recipe, targets: TensorSpec) -> list[PredictedMemory]:
    """Predict the memory of each stage as the only one of its process. Equal stages are counted once.

    Arguments and errors are those of :func:`petra.cost_model.memory.account`; processes of the plan don't matter.
    """
    if len({*plan.boundary_delays}) > 1 and len(plan.stages) <= UNEQUAL:
        layout = replace(plan.layout, processes=_one_each(len(plan.stages)))
        alone = (account(replace(plan, layout=layout), recipe, targets, process=j).memory for j in range(len(plan.stages)))
        return [replace(memory, stages={}) for memory in alone]
    known: dict[Hashable, _Kind] = {}
    found = []
    for j in range(len(plan.stages)):
        short, place = _shortened(plan, j), min(j, EARLIER)
        key = _key(short, place)
        if key not in known:
            known[key] = _kind(short, place, recipe, targets)
        found.append(known[key].memory_of(_Counts.of(plan, j)))
    return found


class _Counts(NamedTuple):
    """What a stage has several of at its peak.

    Attributes:
        k: Microbatches per update, if the pipeline drains before it, otherwise 0.
        others: Microbatches between their forward and backward, besides the one that the stage works on.
        postponed: Microbatches between the two parts of their backward.
        versions: Old versions of the weights, which microbatches in flight use.
    """

    k: int
    others: int
    postponed: int
    versions: int

    @staticmethod
    def of(plan: Plan, j: int) -> _Counts:
        """Return the counts of a stage of a plan."""
        stage, k = plan.stages[j], plan.k
        if plan.method.flush:
            return _Counts(k, min(stage.delay, k - 1), min(stage.lag, k - 1), 0)
        return _Counts(0, stage.delay, 0, -(-stage.delay // k) if stage.weights is Weights.STASHED else 0)


@dataclass(frozen=True)
class _Kind:
    """Memory of a kind of stage in a short pipeline, its counts there, and the bytes that one more of each takes."""

    memory: PredictedMemory
    counts: _Counts
    microbatch: int
    postponed: int
    version: int

    def memory_of(self, counts: _Counts) -> PredictedMemory:
        """Return the memory of a stage of this kind with other counts."""
        more = self._in_flight(counts) - self._in_flight(self.counts) + self.version * (counts.versions - self.counts.versions)
        return replace(self.memory, stored=self.memory.stored + more)

    def _in_flight(self, counts: _Counts) -> int:
        """Return the bytes of microbatches in flight. After i backwards of k, i are postponed at most, and k - 1 - i are left."""
        _, others, postponed, *_ = counts
        after = [0] if not postponed else range(counts.k)
        left = (others if not postponed else min(others, counts.k - 1 - i) for i in after)
        return max(self.microbatch * n + self.postponed * min(i, postponed) for i, n in zip(after, left, strict=True))


def _kind(short: Plan, j: int, recipe: Recipe, targets: TensorSpec) -> _Kind:
    """Count the memory of a stage of a short pipeline, and what one more of each count takes."""

    (memory, ends), counts = account(short, recipe, targets, process=j), _Counts.of(short, j)
    filled = short.stages[j].delay
    microbatch = ends[filled - 1] - ends[filled - 2] if filled > 1 else 0  # between two forwards before the first backward
    postponed = 0
    if counts.postponed == LAG:
        stages = tuple(replace(stage, lag=stage.lag + (i == j)) for i, stage in enumerate(short.stages))
        further = account(replace(short, k=short.k + 1, stages=stages), recipe, targets, process=j)
        postponed = further.memory.tensors - memory.tensors
    return _Kind(replace(memory, stages={}), counts, microbatch, postponed, version=memory.gradients)


def _shortened(plan: Plan, j: int) -> Plan:
    """Return the plan of a stage, the one before it, and some after it, with a delay and a k that are short."""
    stage, method, last = plan.stages[j], plan.method, len(plan.stages) - 1
    first, end = max(j - EARLIER, 0), min(j + NEIGHBOURS, last)
    while end < last and not method.fill and stage.delay - plan.delays[end] < min(_Counts.of(plan, j).others, DELAY):
        end += 1
    tail = stage.delay - min(stage.delay, plan.k - 1, DELAY) if method.fill else plan.delays[end]
    exact = plan.k <= K and any(s.lag for s in plan.stages)
    lags = [min(s.lag, plan.k if exact else LAG) for s in plan.stages[first : end + 1]]
    delays = [tau - tail for tau in plan.delays[first : end + 1]]
    k = plan.k if exact else min(plan.k, _least_k(plan, j, delays[j - first], lags[j - first]))
    part = slice(first, end + 1)
    chosen = zip(plan.stages[part], delays, lags, strict=True)
    stages = tuple(replace(s, index=i, delay=tau, lag=lag) for i, (s, tau, lag) in enumerate(chosen))
    layout = replace(plan.layout, stages=plan.layout.stages[part], processes=_one_each(len(stages)))
    between = slice(first, end)
    return replace(
        plan,
        k=k,
        stages=stages,
        layout=layout,
        boundary_delays=plan.boundary_delays[between],
        boundaries=plan.boundaries[between],
    )


def _one_each(stages: int) -> tuple[range, ...]:
    """Return the stages of each process if it has one."""
    return tuple(range(j, j + 1) for j in range(stages))


def _least_k(plan: Plan, j: int, delay: int, lag: int) -> int:
    """Return a small k for a stage with a short delay and lag."""
    if plan.method.flush:  # drained in the same phase of the schedule
        return delay + 1 if plan.stages[j].delay >= plan.k - 1 and not lag else delay + lag + 2
    return max(delay, 2) if plan.method.weights is Weights.DOUBLE else 2


def _key(short: Plan, j: int) -> Hashable:
    """Return what the memory of a stage of a short pipeline depends on."""
    stage, near = short.stages[j], slice(max(j - 1, 0), j + 1)
    earlier = () if len({*short.boundary_delays}) < 2 else short.boundary_delays[:j]
    kinds = tuple(short.model.blocks[b].kind for b in stage.blocks)
    return (
        *(kinds, stage.inputs, stage.keeps, stage.weights, stage.split, stage.lag, short.k),
        *(j == 0, j == len(short.stages) - 1, short.delays[j:], earlier, short.boundary_delays[j : j + 1], short.boundaries[near]),
    )
