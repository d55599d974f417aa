"""Layer-wise adaptive rate scaling."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from petra.torch_private import foreach_add, foreach_add_, foreach_mul, foreach_mul_, foreach_norm, foreach_sub_


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
            self._step(parameters, group, skip)

    def _step(self, parameters: list[Tensor], group: dict[str, Any], skip: Tensor | None) -> None:
        """Update the parameters of a group, unless ``skip`` is not zero."""
        velocities = [self.state[p]["velocity"] for p in parameters]
        updates = list(foreach_add([p.grad for p in parameters], parameters, alpha=group["weight_decay"]))
        scaled = [i for i, p in enumerate(parameters) if p.dim() > 1]
        if scaled:
            w = torch.stack(foreach_norm([parameters[i] for i in scaled]))
            g = torch.stack(foreach_norm([parameters[i].grad for i in scaled]))
            scales = torch.where((w > 0) & (g > 0), group["trust"] * w / (g + group["weight_decay"] * w), 1.0)
            foreach_mul_([updates[i] for i in scaled], list(scales.unbind()))
        if skip is None:
            foreach_mul_(velocities, group["momentum"])
            foreach_add_(velocities, updates, alpha=group["lr"])
            foreach_sub_(parameters, velocities)
            return
        # A skipped update multiplies the velocities by 1 and adds zeros.
        clear_if(skip, updates)
        momentum = torch.full_like(skip, group["momentum"], dtype=velocities[0].dtype).masked_fill_(skip > 0, 1.0)
        foreach_mul_(velocities, momentum)
        foreach_add_(velocities, updates, alpha=group["lr"])
        changes = foreach_mul(velocities, 1.0)
        clear_if(skip, changes)
        foreach_sub_(parameters, changes)


def clear_if(flag: Tensor, tensors: Sequence[Tensor]) -> None:
    """Set floating-point tensors to zero, NaN included, if ``flag`` is not zero. All tensors have one type.

    Their bits are multiplied by 0 or 1 as integers, in one kernel for all of them.
    """
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[tensors[0].element_size()]
    foreach_mul_([t.view(integers) for t in tensors], (flag == 0).to(integers))
