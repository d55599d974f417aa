"""Discrepancy correction, PipeMare's technique T2: the backward pass estimates the weights that the forward pass used.

The backward pass of a stage with staleness s differentiates, and reconstructs with, the weights

    w − s·d,    d ← γ·d + (1 − γ)·(change of w in the last update),    γ = D^(1/s)

where d is a moving average of the change of w per update and D is the setting.

Source: Yang et al. 2021, PipeMare, with D = 0.135 ≈ e⁻². The formula is written from memory; the paper's text was not available to
compare it. Technique T3, a synchronous warm-up, is not implemented.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from petra.engine.stage import Stage
from petra.engine.update import LearningRate, Part
from petra.errors import Share, require
from petra.method import Method, Weights
from petra.plan import Plan
from petra.staleness.step import AroundStep, Checked
from petra.torch_private import foreach_add, foreach_lerp_
from petra.update_rules import UpdateRules


@dataclass(frozen=True)
class Correction(Checked):
    """Discrepancy correction (see :mod:`petra.staleness.correction`).

    Attributes:
        correction: Decay D of the weights' average change; >= 0 and < 1.

    Raises:
        ConfigError: If it is out of range or of another type.
    """

    derives: ClassVar[bool] = True
    correction: Share = 0.135

    def check(self, method: Method, rules: UpdateRules, rate: LearningRate | None) -> None:
        free = method.weights is Weights.CURRENT and not method.writes_through_graphs
        expected = "0 unless method.weights=current and method.keep is input or nothing"
        require(free, "remedy.correction", expected, self.correction)

    def parts(self, stage: Stage, optimizer: torch.optim.Optimizer, plan: Plan, j: int) -> Sequence[Part]:
        staleness = plan.stages[j].staleness
        return [_Corrected(stage, optimizer, self.correction, staleness)] if staleness else []


class _Corrected(AroundStep):
    """Weights for the backward pass of one stage."""

    kind = "drift"  # d
    uses_change = True

    def __init__(self, stage: Stage, optimizer: torch.optim.Optimizer, decay: float, staleness: float) -> None:
        super().__init__(optimizer)
        self._stage, self._decay, self._staleness = stage, decay, staleness

    def after_step(self, change: list[Tensor]) -> None:
        if not self.values:
            self.values = [torch.zeros_like(p) for p in self.parameters]
        foreach_lerp_(self.values, change, 1 - self._decay ** (1 / self._staleness))
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        weights = list(foreach_add(self.parameters, self.values, alpha=-self._staleness)) if self.values else []
        self._stage.use_in_backward(self.by_parameter(weights))
