"""Memory of every stage of a long pipeline, each in a process of its own, from the account of a few short pipelines.

A stage of a long pipeline differs from the same stage of a short one only in how many microbatches are in flight, and how many
versions of the weights they use. So :func:`petra.cost_model.memory.account` runs each kind of stage with its neighbours, a short
delay and a small k, and what one microbatch, one version and one backward take there is added for each further one.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import NamedTuple

from petra.cost_model.block_memory import Known
from petra.cost_model.memory import PredictedMemory, account
from petra.diagnostics.activation_memory import BLOCK
from petra.engine.recipe import Recipe
from petra.method import Weights
from petra.plan import Plan
from petra.specs import TensorSpec

DELAY = 2
"""Least delay of a stage in a short pipeline, if its own is longer."""
EARLIER = 4
"""Earlier stages in a short pipeline, if there are as many: their delays determine when messages arrive."""
UNEQUAL = 32
"""Most stages of a pipeline with unequal delays that is not shortened. In longer ones, waiting messages are not counted exactly."""
LATER = 1
"""Least number of later stages in a short pipeline, if there are as many."""


def predict_stages(plan: Plan, recipe: Recipe, targets: TensorSpec, known: Known | None = None) -> list[PredictedMemory]:
    """Predict the memory of each stage as the only one of its process. Equal stages are counted once.

    Other arguments and errors are those of :func:`petra.cost_model.memory.account`; processes of the plan don't matter.

    Args:
        known: Stages and passes of blocks that have been counted, to which this call adds its own. Plans with the same model,
            inputs, number formats and recipe may share it; methods, k and partitions may differ.
    """
    known = {} if known is None else known
    kinds: dict[Hashable, Kind] = known.setdefault("stages", {})
    whole = len({*plan.boundary_delays}) > 1 and len(plan.stages) <= UNEQUAL
    found = []
    for j in range(len(plan.stages)):
        short, place = (_alone(plan), j) if whole else (_shortened(plan, j), min(j, EARLIER))
        key = _key(short, place)
        if key not in kinds:
            kinds[key] = _kind(short, place, recipe, targets, known)
        found.append(kinds[key].memory_of(_Counts.of(plan, j)))
    return found


class _Counts(NamedTuple):
    """What a stage has several of at its peak.

    Attributes:
        k: Microbatches per update, if the pipeline drains before it, otherwise 0.
        others: Microbatches between their forward and backward, besides the one that the stage works on.
        versions: Old versions of the weights, which microbatches in flight use.
        backwards: Backwards since the last update. Each leaves the sums of the gradients that it has received.
    """

    k: int
    others: int
    versions: int
    backwards: int

    @staticmethod
    def of(plan: Plan, j: int) -> _Counts:
        """Return the counts of a stage of a plan."""
        stage, k = plan.stages[j], plan.k
        if plan.method.flush:
            others = min(stage.delay, k - 1)
            return _Counts(k, others, 0, k - 1 - others)
        if stage.weights is Weights.STASHED and stage.delay:  # later in an update, fewer versions are in use
            return _Counts(0, stage.delay, -(-stage.delay // k), (stage.delay - 1) % k)
        return _Counts(0, stage.delay, 0, k - 1)


@dataclass(frozen=True)
class Kind:
    """Memory of a kind of stage in a short pipeline, and of further ones with other counts.

    Attributes:
        memory: Memory in the short pipeline.
        counts: Counts there.
        microbatch, version, backward: Bytes that one more of each count takes.
    """

    memory: PredictedMemory
    counts: _Counts
    microbatch: int
    version: int
    backward: int

    def memory_of(self, counts: _Counts) -> PredictedMemory:
        """Return the memory of a stage of this kind with other counts."""
        more = self.microbatch * (counts.others - self.counts.others)
        more += self.version * (counts.versions - self.counts.versions)
        more += self.backward * (counts.backwards - self.counts.backwards)
        return replace(self.memory, stored=self.memory.stored + more)


def _kind(short: Plan, j: int, recipe: Recipe, targets: TensorSpec, known: Known) -> Kind:
    """Count the memory of a stage of a short pipeline, and what one more of each count takes."""
    (memory, stored), counts = account(short, recipe, targets, process=j, known=known), _Counts.of(short, j)
    microbatch = stored[DELAY] if counts.others >= DELAY else 0  # the first forwards allocate buffers for messages
    backward = BLOCK * len(short.stages[j].outputs)
    return Kind(replace(memory, stages={}), counts, microbatch, version=memory.gradients, backward=backward)


def _shortened(plan: Plan, j: int) -> Plan:
    """Return the plan of a stage, the one before it, and some after it, with a delay and a k that are short."""
    stage, method, last = plan.stages[j], plan.method, len(plan.stages) - 1
    first, end = max(j - EARLIER, 0), min(j + LATER, last)
    while end < last and not method.fill and stage.delay - plan.delays[end] < min(_Counts.of(plan, j).others, DELAY):
        end += 1
    tail = stage.delay - min(stage.delay, plan.k - 1, DELAY) if method.fill else plan.delays[end]
    delays = [tau - tail for tau in plan.delays[first : end + 1]]
    k = min(plan.k, _least_k(plan, j, delays[j - first]))
    part = slice(first, end + 1)
    stages = tuple(replace(s, index=i, delay=tau) for i, (s, tau) in enumerate(zip(plan.stages[part], delays, strict=True)))
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


def _alone(plan: Plan) -> Plan:
    """Return the plan with a process for each stage, and with a k of 1 if the memory for another k follows from it."""
    k = 1 if plan.method.weights is Weights.CURRENT and not plan.method.flush else plan.k
    return replace(plan, k=k, layout=replace(plan.layout, processes=_one_each(len(plan.stages))))


def _one_each(stages: int) -> tuple[range, ...]:
    """Return the stages of each process if it has one."""
    return tuple(range(j, j + 1) for j in range(stages))


def _least_k(plan: Plan, j: int, delay: int) -> int:
    """Return a small k for a stage with a short delay."""
    if plan.method.flush:  # drained in the same phase of the schedule
        return delay + 1 if plan.stages[j].delay >= plan.k - 1 else delay + 2
    return 1 if plan.stages[j].weights is Weights.CURRENT else max(delay, 2)  # so few versions as for a larger k


def _key(short: Plan, j: int) -> Hashable:
    """Return what the memory of a stage of a short pipeline depends on."""
    stage, near = short.stages[j], slice(max(j - 1, 0), j + 1)
    earlier = () if len({*short.boundary_delays}) < 2 else short.boundary_delays[:j]
    kinds = tuple(short.model.blocks[b].kind for b in stage.blocks)
    return (
        *(kinds, stage.inputs, stage.keeps, stage.weights, stage.staleness > 0, short.k, short.flush_every),
        *(j == 0, j == len(short.stages) - 1, short.delays[j:], earlier, short.boundary_delays[near], short.boundaries[near]),
    )
