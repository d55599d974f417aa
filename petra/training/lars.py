"""Layer-wise adaptive rate scaling."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor


class LARS(torch.optim.Optimizer):
    """SGD with momentum and a learning rate scaled per parameter (You, Gitman, Ginsburg 2017, Algorithm 1)::

        λ = trust · |w| / (|g| + β |w|)
        v ← momentum · v + lr · λ · (g + β w)
        w ← w − v

    λ is 1 for one-dimensional parameters, and where the norm of the weight or of the gradient is zero.

    Args:
        groups: Parameter groups, each with its ``weight_decay`` β.
        momentum: Factor of the velocity v.
        trust: Trust coefficient, η in the paper.
    """

    # As in torch's fused optimizers, step() skips updates by `found_inf` without synchronizing with the device.
    _step_supports_amp_scaling = True

    def __init__(self, groups: Iterable[dict[str, Any]], *, lr: float = 0.0, momentum: float = 0.9, trust: float = 0.001) -> None:
        super().__init__(groups, {"lr": lr, "momentum": momentum, "trust": trust, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient, with a few kernels for all of them together."""
        skip: Tensor | None = getattr(self, "found_inf", None)
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            if not parameters:
                continue
            for p in parameters:
                if "velocity" not in self.state[p]:
                    self.state[p]["velocity"] = torch.zeros_like(p)
            velocities = [self.state[p]["velocity"] for p in parameters]
            gradients = [p.grad for p in parameters]
            decay = group["weight_decay"]
            weight_norms, gradient_norms = torch._foreach_norm(parameters), torch._foreach_norm(gradients)
            scales = [
                torch.ones_like(w) if p.dim() <= 1 else torch.where((w > 0) & (g > 0), group["trust"] * w / (g + decay * w), 1.0)
                for p, w, g in zip(parameters, weight_norms, gradient_norms, strict=True)
            ]
            updates = torch._foreach_add(gradients, parameters, alpha=decay)
            torch._foreach_mul_(updates, scales)
            new = list(torch._foreach_mul(velocities, group["momentum"]))
            torch._foreach_add_(new, updates, alpha=group["lr"])
            if skip is not None:
                keep = skip > 0
                new = [torch.where(keep, v, f) for v, f in zip(velocities, new, strict=True)]
                torch._foreach_copy_(velocities, new)
                torch._foreach_sub_(parameters, [torch.where(keep, torch.zeros_like(f), f) for f in new])
            else:
                torch._foreach_copy_(velocities, new)
                torch._foreach_sub_(parameters, new)
