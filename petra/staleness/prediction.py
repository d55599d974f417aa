"""Weight prediction: passes use an estimate of later weights.

A stage with staleness s uses in F the estimate for h·s updates ahead, the time of the microbatch's B, where h is the horizon. B
uses the current weights. There are three ways to predict n updates:

* ``velocity``: w + n·step, with −lr·v for SGD with the momentum buffer v, and −lr·m̂ / (√v̂ + ε) for Adam and AdamW. This is
  PipeOptim (Guan et al.), and for SGD also LWPv of Kosson et al. 2021. The step for Adam first appeared in XPipe (Guan et al.
  2019). It is the last step, repeated n times.
* ``decaying``: what the optimizer would do in n updates if no gradient came, as in FTPipe (Eliad et al. 2021; compared with its
  code): −lr·(m + m² + … + m^n)·v for SGD with momentum m. For Adam and AdamW it is the sum of −lr·β1^i·m_t / (1 − β1^(t+i)) /
  (√(v_t / (1 − β2^(t+i))) + ε) over i = 1 … n after t steps, and for AdamW w is also multiplied by 1 − lr·decay in each. A
  fraction of an update counts in proportion.
* ``difference``: w + n·(change of w in the last update) (LWPw of Kosson et al. 2021), for any optimizer.

With ``predict_backward``, as in SpecTrain (Chen et al. 2018), all passes of a microbatch aim at the weights at the time of the
first stage's B, which ends the microbatch: B predicts h·b updates and F h·(s + b), with b the number of updates from the stage's
own B to the first stage's, (τ_1 − τ_j) / 2k. SpecTrain has d = 1, k = 1, and rounds b = (j − 1) / 2 down to an integer (compared
with ntueclab/SpecTrain-PyTorch); here it may be a fraction.

``velocity`` and ``decaying`` only approximate the optimizer's step. They omit the gradient's part in Nesterov momentum, and the
weight decay of SGD and Adam; ``velocity`` also omits that of AdamW.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any

import torch
from torch import Tensor

from petra.engine.recipe import Recipe, Remedy
from petra.engine.stage import Stage
from petra.engine.update import Part
from petra.errors import check_types, require
from petra.method import Method, Weights
from petra.plan import Plan
from petra.staleness.correction import Correction, require_current
from petra.staleness.step import AroundStep, require_momentum
from petra.torch_private import foreach_add


class Prediction(StrEnum):
    """How weights are predicted; see :mod:`petra.staleness.prediction`."""

    VELOCITY = "velocity"
    DECAYING = "decaying"
    DIFFERENCE = "difference"


@dataclass(frozen=True)
class WeightPrediction(Remedy):
    """Weight prediction (see :mod:`petra.staleness.prediction`).

    Attributes:
        prediction: How weights are predicted.
        horizon: Factor h of the number of predicted updates s; > 0 and <= 100. Kosson et al. 2021 use 1 or 2.
        predict_backward: Whether backward passes predict weights too, as in SpecTrain.

    Raises:
        ConfigError: If a value is out of range or of another type.
    """

    prediction: Prediction
    horizon: Annotated[float, "> 0 and <= 100"] = 1.0
    predict_backward: bool = False

    def __post_init__(self) -> None:
        check_types(self, "remedy.")

    def check(self, method: Method, recipe: Recipe) -> None:
        if self.predict_backward:
            # Each of the two sets the weights of backward passes.
            corrects = any(isinstance(remedy, Correction) for remedy in recipe.remedies)
            require(not corrects, "remedy.predict_backward", "false with remedy.correction > 0", "true")
            require_current(method, "remedy.predict_backward", "false", True)
        fits = method.weights is not Weights.DOUBLE and not method.writes_through_graphs
        expected = "none with method.weights=double, and with method.weights=current and method.keep=graph"
        require(fits, "remedy.prediction", expected, self.prediction)

    def prepare(self, optimizer: torch.optim.Optimizer) -> None:
        if self.prediction is not Prediction.DIFFERENCE and not isinstance(optimizer, torch.optim.Adam):
            require_momentum("remedy.prediction", optimizer, "adam, adamw, or ")

    def parts(self, stage: Stage, optimizer: torch.optim.Optimizer, plan: Plan, j: int) -> Sequence[Part]:
        until_first = 0.0 if plan.method.flush else (plan.delays[0] - plan.delays[j]) / (2 * plan.k)
        ahead = until_first if self.predict_backward else 0.0
        forward, backward = self.horizon * (plan.stages[j].staleness + ahead), self.horizon * ahead
        return [_Predicted(stage, optimizer, self.prediction, forward, backward)] if forward else []


class _Predicted(AroundStep):
    """Predicted weights of one stage.

    Args:
        stage: The stage.
        optimizer: Its optimizer.
        prediction: How weights are predicted.
        forward, backward: Number of updates that forward and backward passes predict.
    """

    def __init__(
        self, stage: Stage, optimizer: torch.optim.Optimizer, prediction: Prediction, forward: float, backward: float
    ) -> None:
        super().__init__(optimizer)
        self._stage, self._prediction, self._forward, self._backward = stage, prediction, forward, backward
        if prediction is Prediction.DIFFERENCE:
            self.uses_change, self.kind = True, "change"

    def after_step(self, change: list[Tensor]) -> None:
        self.values = change
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """Set the weights that forward and backward passes use until the next update."""
        forward = self.by_parameter(self._weights(self._forward))
        self._stage.use_in_forward(forward)
        if self._backward:
            same = self._backward == self._forward  # The last stage differentiates the graph of its forward pass.
            self._stage.use_in_backward(forward if same else self.by_parameter(self._weights(self._backward)))

    def _weights(self, updates: float) -> list[Tensor]:
        """Return the weights after a number of further updates; none before the first update."""
        if self.uses_change:
            return list(foreach_add(self.parameters, self.values, alpha=updates)) if self.values else []
        state = self.optimizer.state
        if not any(state[p] for p in self.parameters):
            return []
        pairs = [(p, group) for group in self.optimizer.param_groups for p in group["params"]]
        if self._prediction is Prediction.DECAYING:
            return [decayed(p, state[p], group, updates) if state[p] else p.clone() for p, group in pairs]
        # A parameter without state has had no gradient yet.
        steps = [velocity(state[p], group) if state[p] else torch.zeros_like(p) for p, group in pairs]
        return list(foreach_add(self.parameters, steps, alpha=updates))


def velocity(state: Mapping[str, Any], group: Mapping[str, Any]) -> Tensor:
    """Return −lr·v, or −lr·m̂ / (√v̂ + ε) for Adam and AdamW, from a parameter's optimizer state and its group's settings."""
    if "exp_avg" in state:
        return _adam_step(state, group, 0)
    return state["momentum_buffer"] * -group["lr"]  # type: ignore[no-any-return]


def decayed(w: Tensor, state: Mapping[str, Any], group: Mapping[str, Any], updates: float) -> Tensor:
    """Return a parameter's weights after a number of updates without gradients."""
    if "exp_avg" not in state:
        m = group["momentum"]
        return w - state["momentum_buffer"] * (group["lr"] * (m - m ** (updates + 1)) / (1 - m))  # type: ignore[no-any-return]
    decay = group["lr"] * group["weight_decay"] if group.get("decoupled_weight_decay", False) else 0.0
    predicted, beta1 = w.clone(), group["betas"][0]
    for i in range(1, math.ceil(updates) + 1):
        part = min(1.0, updates - i + 1)
        predicted.mul_(1 - part * decay).add_(_adam_step(state, group, i), alpha=part * beta1**i)
    return predicted


def _adam_step(state: Mapping[str, Any], group: Mapping[str, Any], later: int) -> Tensor:
    """Return −lr·m_t / (1 − β1^(t+i)) / (√(v_t / (1 − β2^(t+i))) + ε) for i = ``later``."""
    # The step count may be on the device. After a skipped first update it is 0, and so is the average.
    (beta1, beta2), t = group["betas"], torch.as_tensor(state["step"], dtype=torch.float64).clamp(min=1) + later
    scale = (state["exp_avg_sq"] / (1 - beta2**t)).sqrt_().add_(group["eps"])
    return (state["exp_avg"] / scale).mul_(-group["lr"] / (1 - beta1**t))  # type: ignore[no-any-return]
