"""Layer-wise adaptive rate scaling."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor


class LARS(torch.optim.Optimizer):
    """SGD with momentum whose rate is scaled for each parameter (You, Gitman, Ginsburg 2017, Algorithm 1)::

        λ = trust · |w| / (|g| + β |w|)
        v ← momentum · v + lr · λ · (g + β w)
        w ← w − v

    Parameters of one dimension, and those whose weight or gradient is zero, have λ = 1.

    Args:
        groups: parameter groups with their ``weight_decay`` β.
        trust: η of the paper.
    """

    # Step honours `found_inf` without asking the device, like torch's fused optimizers.
    _step_supports_amp_scaling = True

    def __init__(self, groups: Iterable[dict[str, Any]], *, lr: float = 0.0, momentum: float = 0.9, trust: float = 0.001) -> None:
        super().__init__(groups, {"lr": lr, "momentum": momentum, "trust": trust, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One step of all parameters that have a gradient, in a few kernels for all of them together."""
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
            weights, slopes = torch._foreach_norm(parameters), torch._foreach_norm(gradients)
            scales = [
                torch.ones_like(w) if p.dim() <= 1 else torch.where((w > 0) & (g > 0), group["trust"] * w / (g + decay * w), 1.0)
                for p, w, g in zip(parameters, weights, slopes, strict=True)
            ]
            updates = torch._foreach_add(gradients, parameters, alpha=decay)
            torch._foreach_mul_(updates, scales)
            fresh = list(torch._foreach_mul(velocities, group["momentum"]))
            torch._foreach_add_(fresh, updates, alpha=group["lr"])
            if skip is not None:
                keep = skip > 0
                fresh = [torch.where(keep, v, f) for v, f in zip(velocities, fresh, strict=True)]
                torch._foreach_copy_(velocities, fresh)
                torch._foreach_sub_(parameters, [torch.where(keep, torch.zeros_like(f), f) for f in fresh])
            else:
                torch._foreach_copy_(velocities, fresh)
                torch._foreach_sub_(parameters, fresh)
