"""Error feedback: an update is extrapolated by the staleness, from the last two updates.

    w ← w − u_t − c·s·(u_t − u_(t−1))

where u_t is what the optimizer subtracts, with its learning rate and weight decay, u_(t−1) the same of the parameter's update
before (not the corrected one), s the staleness in updates, and c the setting. A parameter's first update is not corrected.

Source: arXiv 2606.30634, for a delay of one update (s = 1, as in PipeDream-2BW) and c = 1; compared with the code of
lodestone-rock/RamTorch. The factor s for other delays is our extension.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from petra.engine.stage import Stage
from petra.engine.update import Part
from petra.plan import Plan
from petra.staleness.step import AroundStep, Checked


@dataclass(frozen=True)
class Feedback(Checked):
    """Error feedback (see :mod:`petra.staleness.feedback`).

    Attributes:
        feedback: Factor c of the extrapolation; >= 0.

    Raises:
        ConfigError: If it is out of range or of another type.
    """

    feedback: Annotated[float, ">= 0"] = 1.0

    def parts(self, stage: Stage, optimizer: torch.optim.Optimizer, plan: Plan, j: int) -> Sequence[Part]:
        staleness = plan.stages[j].staleness
        return [_Extrapolated(optimizer, self.feedback * staleness)] if staleness else []


class _Extrapolated(AroundStep):
    """Corrects each update of a stage, by a strength of c·s. Values are −u_(t−1), NaN before the first update."""

    kind, missing = "feedback", torch.nan
    uses_change = True

    def __init__(self, optimizer: torch.optim.Optimizer, strength: float) -> None:
        super().__init__(optimizer)
        self._strength = strength

    def after_step(self, change: list[Tensor]) -> None:
        last = self.values or [torch.full_like(new, self.missing) for new in change]
        for p, new, previous in zip(self.parameters, change, last, strict=True):
            if p.grad is not None:
                unknown = previous.isnan() if self.skipped is None else previous.isnan() | (self.skipped > 0)
                p.add_(torch.where(unknown, 0.0, new - previous), alpha=self._strength)
        own = zip(self.parameters, change, last, strict=True)
        self.values = [previous if p.grad is None else new for p, new, previous in own]
