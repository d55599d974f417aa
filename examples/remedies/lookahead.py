"""Look-ahead: Nesterov's method for asynchronous pipelines, with discounted gradients (Ajanthan et al. 2025).

    w_(t+1) = w_t + d_t − lr·(1 − γ)·g(w_(t−s) + d_(t−s)),    d_t = γ·(w_t − w_(t−1))

For a constant learning rate, this is SGD with Nesterov momentum γ and learning rate (1 − γ)·lr, where the parameters have the value
w_t + d_t. The experiments of the paper use NAdam with stashed weights and one update per microbatch instead.
"""

from __future__ import annotations

from dataclasses import dataclass

from petra import Extension
from petra.errors import require
from petra.staleness.step import require_momentum


@dataclass(frozen=True)
class Lookahead(Extension):
    """Sets Nesterov momentum γ of SGD, and multiplies the learning rate by 1 − γ."""

    momentum: float = 0.99

    def prepare(self, optimizer):
        for group in optimizer.param_groups:
            group.update(momentum=self.momentum, nesterov=True)
        require_momentum("Lookahead", optimizer)

    def check(self, method, rules, rate):
        require(rate is not None, "learning_rate", "a function with Lookahead", None)

    def learning_rate(self, rate, staleness):
        return lambda t: rate(t) * (1 - self.momentum)
