"""Weights that an embedding and a head share, in a pipeline whose gradients are exact."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from petra.engine.options.extension import Extension
from petra.engine.update import Update, squared_norm
from petra.engine.worker import Worker
from petra.method import Method
from petra.plan import Plan
from petra.update_rules import UpdateRules


@dataclass(frozen=True)
class TiedWeights(Extension):
    """Adds up the gradients of two parameters before each update, so that both stay equal bit for bit.

    The sum is between the processes of the first and the last stage, when every stage has done the last microbatch of the update
    and no message is in flight, just before the norms of all stages are added up. The norm counts the parameter once.

    Args:
        embedding, head: Names of the parameters, ``<block>.<name>``. The first is in the first stage, the other one in the last.
    """

    embedding: str
    head: str

    def check(self, method: Method, rules: UpdateRules, rate: Any) -> None:
        """Check that gradients are exact, and clipped by the norm of the whole network."""
        assert rules.clip_globally

    def when_completed(self, act: Callable[[int], None], plan: Plan, workers: Mapping[int, Worker]) -> Callable[[int], None]:
        owners = [next(p for p, owned in enumerate(plan.layout.processes) if j in owned) for j in (0, len(plan.stages) - 1)]
        group = None
        if owners[0] != owners[1]:
            count = len(plan.layout.processes)
            groups = [dist.new_group([replica * count + p for p in owners]) for replica in range(plan.layout.dp)]
            group = groups[dist.get_rank() // count]
        last = len(plan.stages) - 1
        return _Tie(act, plan.k, _found(plan, workers, 0, self.embedding), _found(plan, workers, last, self.head), group)


class _Tie:
    """Called with each microbatch that all stages have done. A parameter comes with the update of its stage, or is not here."""

    def __init__(self, act: Callable[[int], None], k: int, embedding: Any, head: Any, group: dist.ProcessGroup | None) -> None:
        self._act, self._k, self._group = act, k, group
        self._tied = [each for each in (embedding, head) if each is not None]
        self._again = None if head is None else head[0]

    def __call__(self, m: int) -> None:
        if (m + 1) % self._k == 0 and self._tied:
            gradients = [_gradient(p) for p, *_ in self._tied]
            if len(gradients) == 2:
                gradients[0] += gradients[1]
                gradients[1].copy_(gradients[0])
            else:
                dist.all_reduce(gradients[0], group=self._group)
            for update, parameters in {id(update): (update, parameters) for _, update, parameters in self._tied}.values():
                counted = [p for p in parameters if p is not self._again]
                pending: Any = update.pending
                square = squared_norm(counted) if counted else torch.zeros_like(pending.squared_norm)
                pending.squared_norm = pending.squared_clip_norm = square
        self._act(m)


def _found(plan: Plan, workers: Mapping[int, Worker], j: int, name: str) -> tuple[Tensor, Update, list[Any]] | None:
    """Return a parameter of stage j, its updates and all parameters that they train, if the stage is in this process."""
    if j not in workers:
        return None
    worker = workers[j]
    block, _, key = name.partition(".")
    number = [plan.model.blocks[b].name for b in plan.stages[j].blocks].index(block)
    found = dict(worker.stage.module[number].named_parameters())[key]
    return found, worker.update, [*worker.stage.gradients.parameters]


def _gradient(p: Tensor) -> Tensor:
    assert p.grad is not None
    return p.grad
