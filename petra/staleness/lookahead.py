"""Look-ahead: Nesterov's method for asynchronous pipelines, with discounted gradients.

    w_(t+1) = w_t + d_t − lr·(1 − γ)·g(w_(t−s) + d_(t−s)),    d_t = γ·(w_t − w_(t−1))

For a constant learning rate, this is SGD with Nesterov momentum γ and learning rate (1 − γ)·lr, where the parameters have the value
w_t + d_t. The implementation uses this form.

Source: Ajanthan et al. 2025, with γ = 0.99. This remedy uses SGD, with the method's weights and k. The experiments of the paper
use NAdam (:func:`petra.training.optim.nadam`) instead, with stashed weights and one update per microbatch: ``optim=nadam
method=pipedream k=1``.
"""

from __future__ import annotations

import torch

from petra.staleness.optimizers import LearningRate, require_momentum


def set_momentum(optimizer: torch.optim.Optimizer, momentum: float) -> None:
    """Set the Nesterov momentum of an SGD optimizer to ``momentum`` (γ).

    Raises:
        ConfigError: If the optimizer is not SGD.
    """
    for group in optimizer.param_groups:
        group.update(momentum=momentum, nesterov=True)
    require_momentum("lookahead", optimizer)


def scaled(rate: LearningRate, momentum: float) -> LearningRate:
    """Return ``rate`` times 1 − ``momentum``."""

    def scaled_rate(t: int) -> float:
        return rate(t) * (1 - momentum)

    return scaled_rate
