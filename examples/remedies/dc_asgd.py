"""Delay compensation of DC-ASGD: a gradient at old weights is corrected to first order for the current weights.

    g ← g + λ·g⊙g⊙(w − w_old)

for the gradient g of each microbatch, where w_old are the weights that its backward pass differentiated, and w those at its end.
λ·g⊙g approximates the diagonal of the Hessian. Source: Zheng et al. 2017 (arXiv 1609.08326), with a constant λ.
The abstract was read; the formula agrees with it, and λ = 0.04 is from memory.
"""

from __future__ import annotations

from dataclasses import dataclass

from petra import Extension
from petra.engine.block import WrappedRunner
from petra.errors import require
from petra.method import Weights


@dataclass(frozen=True)
class DelayCompensation(Extension):
    """Corrects the gradients of methods that stash weights, with factor λ."""

    strength: float = 0.04

    def check(self, method, rules, rate):
        require(method.weights is not Weights.CURRENT, "method.weights", "stashed or double with DelayCompensation", "current")
        require(rules.loss_scale is None, "trainer.precision", "float32 or bf16 with DelayCompensation", "a loss scale")

    def wrap_runner(self, runner):
        return _Compensated(runner, self.strength)


class _Compensated(WrappedRunner):
    def __init__(self, inner, strength):
        super().__init__(inner)
        self._strength = strength

    def backward(self, m, y, dy):
        old = self.versions.stashed.get(m)
        x, dx, gradients = self.inner.backward(m, y, dy)
        if old is not None:
            names = {p: name for name, p in self.parameters.items()}
            gradients = {p: g + self._strength * g * g * (p.detach() - old[names[p]].detach()) for p, g in gradients.items()}
        return x, dx, gradients
