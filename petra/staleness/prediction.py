"""Weight prediction: the forward pass uses an estimate of the weights at the microbatch's backward pass.

A stage with staleness s uses in F

    w + s·h·step

where h is the horizon, and B uses the current weights. There are two choices for the step.

* ``velocity``: −lr·v for SGD with the momentum buffer v, and −lr·m̂ / (√v̂ + ε) for Adam and AdamW. This is PipeOptim (Guan et al.),
  and for SGD also LWPv of Kosson et al. 2021. The step for Adam first appeared in XPipe (Guan et al. 2019). SpecTrain (Chen et al.
  2018) uses the velocity too, but predicts weights for B as well as for F.
* ``difference``: the change of w in the last update (LWPw of Kosson et al. 2021), for any optimizer.

Both assume s·h equal steps. The velocity only approximates the optimizer's step. It is assumed constant, although it would decay
without further gradients (FTPipe predicts this decay). It omits the gradient's part in Nesterov momentum and in spike compensation,
and the weight decay of AdamW.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor


class Prediction(StrEnum):
    """Which step a prediction repeats; see :mod:`petra.staleness.prediction`."""

    NONE = "none"
    VELOCITY = "velocity"
    DIFFERENCE = "difference"


class WeightPrediction:
    """Weights for the forward pass of one stage.

    Args:
        parameters: The stage's trained parameters, in the optimizer's order.
        optimizer: The stage's optimizer.
        prediction: ``VELOCITY`` or ``DIFFERENCE``.
        steps: Number of steps to predict, s·h.

    Attributes:
        change: With ``DIFFERENCE``, the last change of each parameter; otherwise and before the first update empty.
    """

    def __init__(self, parameters: list[Tensor], optimizer: torch.optim.Optimizer, prediction: Prediction, steps: float) -> None:
        self._parameters, self._optimizer, self._steps = parameters, optimizer, steps
        self.uses_change = prediction is Prediction.DIFFERENCE
        self.change: list[Tensor] = []

    def weights(self) -> Sequence[Tensor] | None:
        """Return the weights for the forward pass, or None before the first update."""
        step = self.change if self.uses_change else self._velocities()
        return torch._foreach_add(self._parameters, step, alpha=self._steps) if step else None

    def _velocities(self) -> list[Tensor]:
        """Return the velocity of each parameter; empty before the optimizer's first step."""
        state = self._optimizer.state
        if not any(state[p] for p in self._parameters):
            return []
        return [
            velocity(state[p], group) if state[p] else torch.zeros_like(p)  # it has had no gradient yet
            for group in self._optimizer.param_groups
            for p in group["params"]
        ]


def velocity(state: Mapping[str, Any], group: Mapping[str, Any]) -> Tensor:
    """Return −lr·v, or −lr·m̂ / (√v̂ + ε) for Adam and AdamW, from a parameter's optimizer state and its group's settings."""
    if "exp_avg" in state:
        # The step count may be on the device. After a skipped first update it is 0, and so is the average.
        (beta1, beta2), t = group["betas"], torch.as_tensor(state["step"], dtype=torch.float64).clamp(min=1)
        scale = (state["exp_avg_sq"] / (1 - beta2**t)).sqrt_().add_(group["eps"])
        return (state["exp_avg"] / scale).mul_(-group["lr"] / (1 - beta1**t))  # type: ignore[no-any-return]
    return state["momentum_buffer"] * -group["lr"]  # type: ignore[no-any-return]
