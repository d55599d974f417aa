"""Spike compensation: an update weighs the newest gradient as if it had arrived s updates ago.

    w ← w − lr·(a·v + b·g),    a = m^s,    b = (1 − m^s) / (1 − m)

where m is the momentum, v ← m·v + g the momentum buffer, g the gradient with weight decay, and s the staleness. This replaces the
optimizer's own combination of v and g: s = 0 is plain momentum, and s = 1 is Nesterov momentum.

Source: Kosson et al. 2021, Pipelined Backpropagation at Scale.
"""

from __future__ import annotations

import torch
from torch import Tensor


class SpikeCompensation:
    """Corrects each step of an SGD optimizer with momentum: call :meth:`before_step`, step, :meth:`after_step`.

    Args:
        optimizer: The stage's optimizer, SGD with momentum.
        staleness: s, in updates.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, staleness: float) -> None:
        self._optimizer, self._staleness = optimizer, staleness
        self._gradients: dict[Tensor, Tensor] = {}

    def before_step(self) -> None:
        """Store g, which weight decay computes from the weights before the step, of each parameter that has a gradient."""
        self._gradients = {
            p: p.grad.add(p, alpha=group["weight_decay"])
            for group in self._optimizer.param_groups
            for p in group["params"]
            if p.grad is not None
        }

    def after_step(self) -> None:
        """Turn the step that SGD has made, −lr·v or with Nesterov momentum −lr·(m·v + g), into −lr·(a·v + b·g)."""
        skips = getattr(self._optimizer, "found_inf", None)
        for group in self._optimizer.param_groups:
            m, nesterov = group["momentum"], group["nesterov"]
            a, b = m**self._staleness, (1 - m**self._staleness) / (1 - m)
            sgd_a, sgd_b = (m, 1.0) if nesterov else (1.0, 0.0)
            for p in group["params"]:
                if p not in self._gradients:
                    continue
                step = self._optimizer.state[p]["momentum_buffer"] * (a - sgd_a) + self._gradients[p] * (b - sgd_b)
                if skips is not None:  # A fused optimizer may have skipped the step on the device.
                    step = torch.where(skips > 0, torch.zeros_like(step), step)
                p.add_(step, alpha=-group["lr"])
        self._gradients = {}
