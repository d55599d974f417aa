"""Adaptive braking: a gradient that agrees with the momentum is weakened, and one that opposes it is strengthened.

    g ← α·g,    α = 1 − ρ·⟨g, v⟩ / (‖g‖·‖v‖)

for each parameter, before the optimizer uses g. v is its momentum buffer (Adam: the average of the gradients) before it includes g.
Source: Venigalla et al. 2020, arXiv 2007.01397, for SGD with momentum. The abstract was read; the formula is written from memory.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from petra import Extension
from petra.errors import require
from petra.staleness.step import AroundStep


@dataclass(frozen=True)
class Braking(Extension):
    """Scales gradients by their cosine with the momentum, with strength ρ."""

    strength: float = 2.0

    def prepare(self, optimizer):
        plain = isinstance(optimizer, torch.optim.SGD) and not all(group["momentum"] > 0 for group in optimizer.param_groups)
        require(not plain, "optim.momentum", "a number > 0 with Braking", 0)

    def parts(self, stage, optimizer, plan, j):
        return [_Braked(optimizer, self.strength)]


class _Braked(AroundStep):
    def __init__(self, optimizer, strength):
        super().__init__(optimizer)
        self._strength = strength

    def before_step(self):
        for p in self.parameters:
            buffers = (self.optimizer.state[p].get(key) for key in ("momentum_buffer", "velocity", "exp_avg"))
            momentum = next((buffer for buffer in buffers if buffer is not None), None)
            if p.grad is not None and momentum is not None:
                norms = p.grad.norm() * momentum.norm()
                cosine = torch.where(norms > 0, torch.dot(p.grad.flatten(), momentum.flatten()) / norms, torch.zeros_like(norms))
                p.grad.mul_(1 - self._strength * cosine)
