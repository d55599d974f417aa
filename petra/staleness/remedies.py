"""Remedies for stale gradients: changes to the learning rate, the weights of F and B, the update and δ, each from its paper.

A stage is s = τ / k updates late (:meth:`petra.method.Method.staleness`). Remedies read s and the optimizer, and act where weights
change anyway, so that F and B of a microbatch cost no more with them than without.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor

from petra.engine.stage import Stage
from petra.errors import ConfigError
from petra.method import Method, Weights

LearningRate = Callable[[int], float]


class Prediction(StrEnum):
    """How the weights at a microbatch's backward are predicted for its forward."""

    NONE = "none"
    VELOCITY = "velocity"
    """w + s·h times the optimizer's smoothed step: −lr·v for SGD with momentum (SpecTrain, Chen et al. 2018; LWPv of Kosson et
    al. 2021), −lr·m̂ / (√v̂ + ε) for Adam and AdamW (XPipe, Guan et al. 2019)."""
    DIFFERENCE = "difference"
    """w + s·h times its last change (LWPw of Kosson et al. 2021); for any optimizer."""


@dataclass(frozen=True)
class Remedy:
    """Which remedies a run uses; they compose unless the constructor or :meth:`check` refuses it.

    Attributes:
        discount: microbatches K over which a learning rate of lr / max(1, s)^p, p = 1 − min(t / K, 1), rises to lr; 0 for off
            (PipeMare, Yang et al. 2021, technique T1).
        correction: B differentiates w − s·δ, δ the moving average of w's change per update with decay ``correction`` ^ (1 / s);
            0 for off (PipeMare, technique T2, whose D is this; there 0.135).
        prediction: F uses predicted weights.
        horizon: h, by which the prediction reaches further than s (Kosson et al. 2021: 1, or 2).
        compensation: the update is −lr·(a·v + b·g) with a = m^s, b = (1 − m^s) / (1 − m), m the momentum (spike compensation,
            Kosson et al. 2021). It replaces the optimizer's own combination: s = 0 is plain momentum, s = 1 Nesterov's.
        shrink: β, by which δ is multiplied at each boundary that delays (gradient shrinking, Zhuang et al. 2021); 1 for off.
        lookahead: γ of w_(t+1) = w_t + d_t − lr·(1 − γ)·g(w_(t−s) + d_(t−s)), d_t = γ·(w_t − w_(t−1)): Nesterov's method with the
            gradient discounted (Ajanthan et al. 2025; there 0.99); 0 for off. The parameters hold w_t + d_t.
    """

    discount: int = 0
    correction: float = 0.0
    prediction: Prediction = Prediction.NONE
    horizon: float = 1.0
    compensation: bool = False
    shrink: float = 1.0
    lookahead: float = 0.0

    def __post_init__(self) -> None:
        _require(self.discount >= 0, "discount", self.discount, "numbers >= 0")
        _require(0 <= self.correction < 1, "correction", self.correction, "numbers from 0 to below 1")
        _require(0 < self.horizon <= 100, "horizon", self.horizon, "numbers above 0 to 100")
        _require(0 < self.shrink <= 1, "shrink", self.shrink, "numbers above 0 to 1")
        _require(0 <= self.lookahead < 1, "lookahead", self.lookahead, "numbers from 0 to below 1")
        both = self.compensation and self.lookahead > 0
        _require(not both, "compensation", True, "false with remedy.lookahead: both say how momentum enters the update")

    def check(self, method: Method) -> None:
        """Refuses what the method leaves no room for.

        Raises:
            ConfigError: B differentiates what F used, so there is nothing to correct; or F may not choose its weights.
        """
        saved = method.writes_through_graphs
        if self.correction:
            fits = method.weights is Weights.CURRENT and not saved
            _require(fits, "correction", self.correction, "0 unless method.weights=current and method.keep is input or nothing")
        if self.prediction is not Prediction.NONE:
            fits = method.weights is not Weights.DOUBLE and not saved
            accepted = "none with method.weights=double, and with method.weights=current and method.keep=graph"
            _require(fits, "prediction", self.prediction, accepted)

    def learning_rate(self, rate: LearningRate | None, staleness: float) -> LearningRate | None:
        """The learning rate of a stage that is ``staleness`` updates late.

        Raises:
            ConfigError: there is no schedule to change.
        """
        if not (self.discount or self.lookahead):
            return rate
        if rate is None:
            raise ConfigError("learning_rate: found None, accepted is a schedule with remedy.discount and remedy.lookahead")
        schedule, late = rate, max(1.0, staleness)

        def changed(t: int) -> float:
            power = 1 - min(t / self.discount, 1) if self.discount else 0
            return schedule(t) * (1 - self.lookahead) / late**power

        return changed

    def at(self, stage: Stage, optimizer: torch.optim.Optimizer, staleness: float) -> StageRemedy | None:
        """The part that acts at a stage's updates, if there is one.

        Raises:
            ConfigError: as :meth:`require_optimizer`.
        """
        self.require_optimizer(optimizer)
        late = staleness > 0 and (self.correction > 0 or self.prediction is not Prediction.NONE)
        return StageRemedy(self, stage, optimizer, staleness) if late or self.compensation else None

    def require_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuses an optimizer that a remedy is not defined for, and gives SGD the momentum that lookahead says.

        Raises:
            ConfigError: it is another one.
        """
        if self.lookahead:
            for group in optimizer.param_groups:
                group.update(momentum=self.lookahead, nesterov=True)
            self._require_sgd("lookahead", optimizer)
        if self.compensation:
            self._require_sgd("compensation", optimizer)
        if self.prediction is Prediction.VELOCITY and not isinstance(optimizer, torch.optim.Adam):
            self._require_sgd("prediction", optimizer, "adam, adamw, ")

    @staticmethod
    def _require_sgd(key: str, optimizer: torch.optim.Optimizer, others: str = "") -> None:
        groups = optimizer.param_groups
        if not isinstance(optimizer, torch.optim.SGD) or not all(g["momentum"] > 0 for g in groups):
            raise ConfigError(f"remedy.{key}: found {_name(optimizer)}, accepted is {others}sgd with momentum > 0")


class StageRemedy:
    """What a remedy does at the updates of one stage: before and after the optimizer's step."""

    def __init__(self, remedy: Remedy, stage: Stage, optimizer: torch.optim.Optimizer, staleness: float) -> None:
        self.remedy, self.stage, self.optimizer, self.staleness = remedy, stage, optimizer, staleness
        self.parameters: list[Tensor] = [p for group in optimizer.param_groups for p in group["params"]]
        late = staleness > 0
        self._corrects = late and remedy.correction > 0
        self._predicts = remedy.prediction if late else Prediction.NONE
        self._drift: list[Tensor] = []  # δ of the correction
        self._change: list[Tensor] = []  # w − w before the last update, for the prediction
        self._before: list[Tensor] = []
        self._gradients: list[Tensor] = []
        optimizer.register_step_pre_hook(self._before_step)
        optimizer.register_step_post_hook(self._after_step)

    def state(self) -> dict[str, dict[Tensor, Tensor]]:
        """What the next updates depend on beside weights and optimizer, by parameter."""
        kept = {"drift": self._drift, "change": self._change}
        return {key: dict(zip(self.parameters, values, strict=True)) for key, values in kept.items() if values}

    def resume(self, state: Mapping[str, Mapping[Tensor, Tensor]]) -> None:
        """Goes on from a :meth:`state`, after weights and optimizer have been loaded.

        On another cut a parameter may come from a stage that was not late, and remembered nothing: it starts from zero.
        """
        used = {"drift": self._corrects, "change": self._predicts is Prediction.DIFFERENCE}
        self._drift, self._change = (
            [values[p].to(p, copy=True) if p in values else torch.zeros_like(p) for p in self.parameters]
            if used[key] and (values := state.get(key))
            else []
            for key in ("drift", "change")
        )
        self._hand_out()

    @torch.no_grad()
    def _before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self.remedy.compensation:
            self._gradients = [_decayed(p, group) for group in optimizer.param_groups for p in group["params"]]
        if self._corrects or self._predicts is Prediction.DIFFERENCE:
            self._before = [p.clone() for p in self.parameters]

    @torch.no_grad()
    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self.remedy.compensation:
            self._compensate()
        if self._before:
            self._change = list(torch._foreach_sub(self.parameters, self._before))
        if self._corrects:
            if not self._drift:
                self._drift = [torch.zeros_like(p) for p in self.parameters]
            decay = self.remedy.correction ** (1 / self.staleness)
            torch._foreach_lerp_(self._drift, self._change, 1 - decay)
        if self._predicts is not Prediction.DIFFERENCE:
            self._change = []
        self._before, self._gradients = [], []
        self._hand_out()

    def _compensate(self) -> None:
        """From the step that SGD has done, −lr·v or with Nesterov −lr·(m·v + g), to −lr·(a·v + b·g)."""
        gradients, skips = iter(self._gradients), getattr(self.optimizer, "found_inf", None)
        for group in self.optimizer.param_groups:
            m, nesterov = group["momentum"], group["nesterov"]
            a, b = m**self.staleness, (1 - m**self.staleness) / (1 - m)
            done_a, done_b = (m, 1.0) if nesterov else (1.0, 0.0)
            for p in group["params"]:
                step = self.optimizer.state[p]["momentum_buffer"] * (a - done_a) + next(gradients) * (b - done_b)
                if skips is not None:  # a fused optimizer left the weights as they were, without telling the host
                    step = torch.where(skips > 0, torch.zeros_like(step), step)
                p.add_(step, alpha=-group["lr"])

    @torch.no_grad()
    def _hand_out(self) -> None:
        """Gives the stage the weights that F and B use until the next update."""
        reach = self.staleness * self.remedy.horizon
        steps = self._velocity() if self._predicts is Prediction.VELOCITY else self._change
        predicted = self._moved(steps, reach) if self._predicts is not Prediction.NONE and steps else None
        corrected = self._moved(self._drift, -self.staleness) if self._drift else None
        self.stage.use_weights(predicted, corrected)

    def _moved(self, steps: Sequence[Tensor], alpha: float) -> dict[Tensor, Tensor]:
        moved = torch._foreach_add(self.parameters, list(steps), alpha=alpha)
        return {p: w.requires_grad_() for p, w in zip(self.parameters, moved, strict=True)}

    def _velocity(self) -> list[Tensor]:
        """The optimizer's next step if no gradient came; empty before its first one."""
        return [
            _velocity(self.optimizer.state[p], group)
            for group in self.optimizer.param_groups
            for p in group["params"]
            if self.optimizer.state[p]
        ]


def _velocity(state: Mapping[str, Any], group: Mapping[str, Any]) -> Tensor:
    if "exp_avg" in state:
        # The count may be on the device, and is 0 after a first update that was skipped, when the average is 0 too.
        (beta1, beta2), t = group["betas"], torch.as_tensor(state["step"], dtype=torch.float64).clamp(min=1)
        scale = (state["exp_avg_sq"] / (1 - beta2**t)).sqrt_().add_(group["eps"])
        return (state["exp_avg"] / scale).mul_(-group["lr"] / (1 - beta1**t))  # type: ignore[no-any-return]
    return state["momentum_buffer"] * -group["lr"]  # type: ignore[no-any-return]


def _decayed(p: Tensor, group: Mapping[str, Any]) -> Tensor:
    """The gradient as SGD takes it in, weight decay included."""
    assert p.grad is not None
    return p.grad.add(p, alpha=group["weight_decay"])


def _name(optimizer: torch.optim.Optimizer) -> str:
    return type(optimizer).__name__.lower()


def _require(right: bool, key: str, found: Any, accepted: str) -> None:
    if not right:
        raise ConfigError(f"remedy.{key}: found {found}, accepted are {accepted}")
