"""Spike compensation: an update weighs the newest gradient as if it had arrived s updates ago.

    w ← w − lr·(a·v + b·g),    a = m^s,    b = (1 − m^s) / (1 − m)

with momentum m, its buffer v ← m·v + g, gradient g with weight decay, and staleness s. s = 0 is plain momentum, s = 1 Nesterov's.
Source: Kosson et al. 2021, Pipelined Backpropagation at Scale.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from petra import Extension
from petra.staleness.step import AroundStep, require_momentum


@dataclass(frozen=True)
class SpikeCompensation(Extension):
    """Compensates spikes in the updates of SGD with momentum."""

    def prepare(self, optimizer):
        require_momentum("SpikeCompensation", optimizer)

    def parts(self, stage, optimizer, plan, j):
        return [_Compensated(optimizer, plan.stages[j].staleness)]


class _Compensated(AroundStep):
    def __init__(self, optimizer, staleness):
        super().__init__(optimizer)
        self._staleness = staleness
        self._gradients: dict[Tensor, Tensor] = {}

    def before_step(self):
        """Store g, which weight decay computes from the weights before the step."""
        for group in self.optimizer.param_groups:
            decay = group["weight_decay"]
            self._gradients |= {p: p.grad.add(p, alpha=decay) for p in group["params"] if p.grad is not None}

    def after_step(self, change):
        """Turn the step that SGD has made, −lr·v or with Nesterov momentum −lr·(m·v + g), into −lr·(a·v + b·g)."""
        skips = getattr(self.optimizer, "found_inf", None)
        for group in self.optimizer.param_groups:
            m = group["momentum"]
            a, b = m**self._staleness, (1 - m**self._staleness) / (1 - m)
            sgd_a, sgd_b = (m, 1.0) if group["nesterov"] else (1.0, 0.0)
            for p in group["params"]:
                if p in self._gradients:
                    step = self.optimizer.state[p]["momentum_buffer"] * (a - sgd_a) + self._gradients[p] * (b - sgd_b)
                    if skips is not None:  # a fused optimizer may have skipped the step on the device
                        step = torch.where(skips > 0, torch.zeros_like(step), step)
                    p.add_(step, alpha=-group["lr"])
        self._gradients = {}
