"""Adaptive braking: a gradient that agrees with the momentum is weakened, and one that opposes it is strengthened.

    g ← α·g,    α = 1 − ρ·⟨g, v⟩ / (‖g‖·‖v‖)

for each parameter tensor, before the optimizer uses g. v is the optimizer's momentum buffer (for Adam: the average of the
gradients) before it includes g, and ρ the setting. This damps oscillations that delays cause along directions of high curvature.

Source: Venigalla et al. 2020, arXiv 2007.01397, for SGD with momentum. The abstract was read; the formula is written from memory.
"""

from __future__ import annotations

import torch

from petra.errors import invalid
from petra.staleness.optimizers import momentum_of


class AdaptiveBraking:
    """Scales the gradients before each step of an optimizer with momentum.

    Args:
        optimizer: The stage's optimizer.
        strength: ρ.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, strength: float) -> None:
        self._optimizer, self._strength = optimizer, strength

    def before_step(self) -> None:
        """Scale the gradient of each parameter that has a momentum that is not zero."""
        for group in self._optimizer.param_groups:
            for p in group["params"]:
                momentum = momentum_of(self._optimizer.state[p])
                if p.grad is None or momentum is None:
                    continue
                alignment = torch.dot(p.grad.flatten(), momentum.flatten())
                norms = p.grad.norm() * momentum.norm()
                cosine = torch.where(norms > 0, alignment / norms, torch.zeros_like(norms))
                p.grad.mul_(1 - self._strength * cosine)


def require_average(optimizer: torch.optim.Optimizer) -> None:
    """Check that an optimizer has momentum.

    Raises:
        ConfigError: If it is SGD without momentum.
    """
    if isinstance(optimizer, torch.optim.SGD) and not all(group["momentum"] > 0 for group in optimizer.param_groups):
        raise invalid("optim.momentum", "a number > 0 with remedy.braking", 0)
