"""Weight prediction: forward passes use an estimate of later weights.

A stage with staleness s uses in F the estimate for h·s updates ahead, the time of the microbatch's B, where h is the horizon. B
uses the current weights. There are two ways to predict n updates:

* ``velocity``: w + n·step, with −lr·v for SGD with the momentum buffer v, and −lr·m̂ / (√v̂ + ε) for Adam and AdamW. This is
  PipeOptim (Guan et al.), and for SGD also LWPv of Kosson et al. 2021. The step for Adam first appeared in XPipe (Guan et al.
  2019). It is the last step, repeated n times. It omits the gradient's part in Nesterov momentum, and weight decay.
* ``difference``: w + n·(change of w in the last update) (LWPw of Kosson et al. 2021), for any optimizer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import torch
from torch import Tensor

from petra.engine.stage import Stage
from petra.engine.update import LearningRate, Part, Pending
from petra.errors import require
from petra.method import Method, Weights
from petra.plan import Plan
from petra.staleness.step import AroundStep, Checked, require_momentum
from petra.torch_private import foreach_add
from petra.update_rules import UpdateRules


@dataclass(frozen=True)
class WeightPrediction(Checked):
    """Weight prediction (see :mod:`petra.staleness.prediction`).

    Attributes:
        prediction: How weights are predicted.
        horizon: Factor h of the number of predicted updates s; > 0 and <= 100. Kosson et al. 2021 use 1 or 2.

    Raises:
        ConfigError: If a value is out of range or of another type.
    """

    derives: ClassVar[bool] = True
    prediction: Literal["velocity", "difference"]
    horizon: Annotated[float, "> 0 and <= 100"] = 1.0

    def check(self, method: Method, rules: UpdateRules, rate: LearningRate | None) -> None:
        fits = method.weights is not Weights.DOUBLE and not method.writes_through_graphs
        expected = "none with method.weights=double, and with method.weights=current and method.keep=graph"
        require(fits, "remedy.prediction", expected, self.prediction)

    def prepare(self, optimizer: torch.optim.Optimizer) -> None:
        if self.prediction == "velocity" and not isinstance(optimizer, torch.optim.Adam):
            require_momentum("remedy.prediction", optimizer, "adam, adamw, or ")

    def parts(self, stage: Stage, optimizer: torch.optim.Optimizer, plan: Plan, j: int) -> Sequence[Part]:
        updates = self.horizon * plan.stages[j].staleness
        return [_Predicted(stage, optimizer, updates, by_change=self.prediction == "difference")] if updates else []

    def parts_after_step(self, stage: Stage, plan: Plan, j: int, others: Sequence[Part]) -> Sequence[Part]:
        return [_AfterSkip(part) for part in others if isinstance(part, _Predicted) and not part.uses_change]


class _Predicted(AroundStep):
    """Predicted weights for the forward passes of one stage.

    Args:
        stage: The stage.
        optimizer: Its optimizer.
        updates: Number of updates to predict.
        by_change: Whether to repeat the last change of the weights, and not the optimizer's velocity.
    """

    def __init__(self, stage: Stage, optimizer: torch.optim.Optimizer, updates: float, *, by_change: bool) -> None:
        super().__init__(optimizer)
        self._stage, self._updates, self.uses_change, self.kind = stage, updates, by_change, "change" if by_change else ""

    def after_step(self, change: list[Tensor]) -> None:
        self.values = change
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """Set the weights that forward passes use until the next update."""
        steps = self.values if self.uses_change else self._velocities()
        self._stage.use_in_forward(
            self.by_parameter(list(foreach_add(self.parameters, steps, alpha=self._updates)) if steps else [])
        )

    def _velocities(self) -> list[Tensor]:
        """Return the optimizer's steps; none before the first update. A parameter without state has had no gradient yet."""
        state = self.optimizer.state
        if not any(state[p] for p in self.parameters):
            return []
        pairs = [(p, group) for group in self.optimizer.param_groups for p in group["params"]]
        return [velocity(state[p], group) if state[p] else torch.zeros_like(p) for p, group in pairs]


class _AfterSkip(Part):
    """Predicts again after a skipped step, with the learning rate of its update, as after a step that the device has skipped."""

    def __init__(self, predicted: _Predicted) -> None:
        self._predicted = predicted

    def run(self, pending: Pending) -> None:
        if pending.skip is not None:
            self._predicted.refresh()


def velocity(state: Mapping[str, Any], group: Mapping[str, Any]) -> Tensor:
    """Return −lr·v, or −lr·m̂ / (√v̂ + ε) for Adam and AdamW, from a parameter's optimizer state and its group's settings."""
    if "exp_avg" not in state:
        return state["momentum_buffer"] * -group["lr"]  # type: ignore[no-any-return]
    # The step count may be on the device. After a skipped first update it is 0, and so is the average.
    (beta1, beta2), t = group["betas"], torch.as_tensor(state["step"], dtype=torch.float64).clamp(min=1)
    scale = (state.get("max_exp_avg_sq", state["exp_avg_sq"]) / (1 - beta2**t)).sqrt_().add_(group["eps"])
    return (state["exp_avg"] / scale).mul_(-group["lr"] / (1 - beta1**t))  # type: ignore[no-any-return]
