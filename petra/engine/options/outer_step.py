"""Replicas that rarely talk: each trains on its own, and an outer step after every H-th update combines what they have learned.

Let θ be the outer weights of a stage, which all replicas have, and w_r the weights that replica r trains. After every H-th update
of the stage, the replicas start to sum their outer gradients θ − w_r. The sum travels while they train. So many updates later as
``overlap`` says, whenever the sum has arrived, each replica does an outer step with Nesterov momentum v:

    Δ = mean of θ − w_r,    v ← μ·v + Δ,    θ ← θ − η·(Δ + μ·v),    w_r ← α·w_r + (1 − α)·θ

Sources: DiLoCo (Douillard et al. 2023, arXiv 2311.08105) without overlap and with α = 0; Streaming DiLoCo (Douillard et al. 2025,
arXiv 2501.18512) with both, and with stages that send after different updates. With one replica, nothing is sent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Literal

import torch
from torch import Tensor

from petra.engine.options.extension import Extension
from petra.engine.options.sums import PACKED, AllReduces, Packed
from petra.engine.stage import Stage
from petra.engine.update import LearningRate, Part, Pending
from petra.errors import DataError, Share, check_types, require
from petra.hooks import Hook
from petra.method import Method
from petra.plan import Plan
from petra.torch_private import foreach_add_, foreach_copy_, foreach_lerp_, foreach_mul_
from petra.transport.port import locate_errors
from petra.update_rules import UpdateRules

OWN, MOMENTUM, MEAN = "method/outer_own", "method/outer_momentum", "method/outer_mean"
"""Kinds of tensors in checkpoints: a replica's own weights, v, and the mean that has not acted yet."""


@dataclass(frozen=True)
class OuterStep(Extension):
    """Outer steps of replicas that train apart (see :mod:`petra.engine.options.outer_step`).

    Attributes:
        every: Updates H between two outer steps; 0: none, replicas sum their gradients at every update.
        lr: Outer learning rate η.
        momentum: Outer Nesterov momentum μ.
        overlap: Updates between the start of a sum and its outer step, less than ``every``; 0: replicas wait for the sum.
        mixing: Part α that a replica keeps of its own weights.
        format: Format in which sums travel: null: the weights' own; bf16; int8 with a scale for each 512 numbers.
        staggered: Whether stages send after different updates: stage j of J (from 0) j · H / J later than the first.

    Raises:
        ConfigError: If a value is out of range or of another type, or has no effect because ``every`` is 0.
    """

    every: Annotated[int, ">= 0"] = 0
    lr: Annotated[float, "> 0"] = 0.7
    momentum: Share = 0.9
    overlap: Annotated[int, ">= 0"] = 0
    mixing: Share = 0.0
    format: Literal["bf16", "int8"] | None = None
    staggered: bool = False

    def __post_init__(self) -> None:
        check_types(self, "outer.")
        fits = self.overlap < max(self.every, 1)
        require(fits, "outer.overlap", f"an integer < outer.every={self.every}", self.overlap)
        for field in fields(self) if self.every == 0 else ():
            expected = f"{'null' if field.default is None else field.default} with outer.every=0, without outer steps"
            require((value := getattr(self, field.name)) == field.default, f"outer.{field.name}", expected.lower(), value)

    def check(self, method: Method, rules: UpdateRules, rate: LearningRate | None) -> None:
        for name, value, accepted in (
            ("shard", rules.shard, False),
            ("average", rules.average, None),
            ("weights", rules.weights, "float32"),
        ):
            expected = f"{'null' if accepted is None else str(accepted).lower()} with outer.every={self.every}"
            require(not self.every or value == accepted, f"optim.{name}", expected, value)

    def check_length(self, updates: int) -> None:
        expected = f"at most {updates}, the updates of the run, which would end before the first outer step"
        require(self.every + self.overlap <= updates, "outer.every + outer.overlap", expected, self.every + self.overlap)

    def prepare(self, optimizer: torch.optim.Optimizer) -> None:
        expected = f"0 with {type(optimizer).__name__}, which has weights of its own for evaluation"
        require(not self.every or not hasattr(optimizer, "eval"), "outer.every", expected, self.every)

    def parts_after_step(self, stage: Stage, plan: Plan, j: int, others: Sequence[Part]) -> Sequence[Part]:
        offset = j * self.every // len(plan.stages) if self.staggered else 0
        return [OuterUpdate(stage, self, j, offset, others)] if self.every else []


class OuterUpdate(Part, Hook):
    """Outer steps of one stage. Comes after the optimizer's step, also if that is skipped.

    While the pipeline trains, its parameters are the replica's own weights. A drained pipeline has the outer weights, which are
    evaluated, saved and exported.

    Args:
        stage: The stage.
        setting: The setting.
        j: Index of the stage, for messages.
        offset: Updates by which the stage sends later than others.
        others: Parts before the step. Those of remedies compute again after an outer step what they derive from the weights.

    Attributes:
        other: The weights that the parameters are not at present: the outer ones in training, the replica's own between runs.
        momentum: v.
        sum: What the replicas sum, in one buffer; once it has arrived, their mean.
        pending: Whether there is a sum that has not acted yet.
    """

    def __init__(self, stage: Stage, setting: OuterStep, j: int, offset: int, others: Sequence[Part]) -> None:
        self._setting, self._j, self._offset = setting, j, offset
        self._parameters, self._derived = stage.gradients.parameters, [part for part in others if hasattr(part, "refresh")]
        self._sums: AllReduces | None = None
        self._size, self._traveling = 1, False
        wide = torch.float64 if any(p.dtype is torch.float64 for p in self._parameters) else torch.float32
        self.sum = torch.zeros(sum(p.numel() for p in self._parameters), dtype=wide, device=self._parameters[0].device)
        parts = torch.split(self.sum, [p.numel() for p in self._parameters])
        self._views = [part.as_strided(p.shape, p.stride()) for part, p in zip(parts, self._parameters, strict=True)]
        self.resume({})

    def join(self, sums: AllReduces, size: int) -> None:
        """Sum over ``size`` replicas from now on, by sums that serve nothing else."""
        self._sums, self._size = sums, size

    @property
    def packed(self) -> Packed | None:
        """The format in which sums travel; None for the weights' own."""
        return None if self._setting.format is None else PACKED[self._setting.format]

    @property
    def overlaps(self) -> bool:
        """Whether sums travel while the replica trains."""
        return self._setting.overlap > 0

    @torch.no_grad()
    def run(self, pending: Pending) -> None:
        """Send after every H-th update, and do an outer step ``overlap`` updates later.

        Raises:
            CommunicationError: If another replica has failed, hangs, or can't be reached.
        """
        setting, since = self._setting, (pending.done + 1 - self._offset) % self._setting.every
        with locate_errors("summing", f"the weights of stage {self._j + 1} over replicas", pending.t - 1):
            if since == 0:
                self.send()
            if self._traveling and since == (setting.overlap + 1) // 2:
                assert self._sums is not None
                self._sums.advance()
            if self.pending and since == setting.overlap:
                self.act()

    @torch.no_grad()
    def send(self) -> None:
        """Start to sum over replicas how far their weights are from the outer ones."""
        foreach_copy_(self._views, self.other)
        foreach_add_(self._views, self._own(), alpha=-1)
        self.pending = True
        if self._sums is not None:
            self._sums.start(self.sum)
            self._traveling = True

    @torch.no_grad()
    def act(self) -> None:
        """Wait for the sum, and do the outer step."""
        self._arrive()
        self._step()

    def _arrive(self) -> None:
        """Wait until the sum is the mean over all replicas. Results don't depend on when it has arrived."""
        if self._traveling:
            assert self._sums is not None
            self.sum *= self._sums.finish()
            self.sum /= self._size
            self._traveling = False

    def _step(self) -> None:
        setting, outer, own = self._setting, self.other, self._own()
        foreach_mul_(self.momentum, setting.momentum)
        mean = [view.to(v) for view, v in zip(self._views, self.momentum, strict=True)]
        foreach_add_(self.momentum, mean)
        foreach_add_(outer, mean, alpha=-setting.lr)
        foreach_add_(outer, self.momentum, alpha=-setting.lr * setting.momentum)
        foreach_lerp_(own, outer, 1 - setting.mixing) if setting.mixing else foreach_copy_(own, outer)
        self.pending = False
        self._refresh()

    def _own(self) -> list[Tensor]:
        """Return the weights of training. Writing to them keeps version counters: graphs in flight refer to the parameters."""
        return [p.data for p in self._parameters]

    def _refresh(self) -> None:
        for part in self._derived:
            part.refresh()

    def train_begin(self, start: int, stop: int) -> None:
        self._swap()
        self._refresh()

    def train_end(self) -> None:
        self._arrive()
        self._swap()

    def _swap(self) -> None:
        for i, p in enumerate(self._parameters):
            self.other[i], p.data = p.data, self.other[i]

    def tensors(self) -> dict[str, dict[Tensor, Tensor]]:
        kinds = {OWN: self.other, MOMENTUM: self.momentum} | ({MEAN: self._views} if self.pending else {})
        return {kind: dict(zip(self._parameters, values, strict=True)) for kind, values in kinds.items()}

    @torch.no_grad()
    def resume(self, tensors: Mapping[str, Mapping[Tensor, Tensor]]) -> None:
        """Restore the state of a drained pipeline. A parameter without one starts again from its value.

        Raises:
            DataError: If it has a sum that waits, as of versions that divided it later.
        """
        expected = f"{MEAN} (commit 449f214c reads older ones)"
        require(not tensors.get("method/outer_sum"), "checkpoint", expected, "method/outer_sum", DataError)
        own, momentum, sums = (tensors.get(kind, {}) for kind in (OWN, MOMENTUM, MEAN))
        self.other = [own.get(p, p).detach().to(p, copy=True) for p in self._parameters]
        self.momentum = [momentum[p].to(p, copy=True) if p in momentum else torch.zeros_like(p) for p in self._parameters]
        self.pending = len(sums) == len(self._parameters)  # the blocks of a stage may come from stages at different updates
        for view, p in zip(self._views, self._parameters, strict=True):
            view.copy_(sums[p]) if p in sums else view.zero_()
