"""Settings of the remedies for stale gradients, and the remedies that act at a stage's updates.

The gradients of a stage are s = τ / k updates old on average (:meth:`petra.method.Method.staleness`). Remedies act when the weights
change, or scale the learning rate, δ or gradients. Only ``delay_compensation`` adds work to backward passes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from petra.errors import check_types, invalid, require
from petra.method import Method, Weights
from petra.staleness import lookahead
from petra.staleness.braking import AdaptiveBraking, require_average
from petra.staleness.compensation import SpikeCompensation
from petra.staleness.correction import Correction
from petra.staleness.discount import discounted
from petra.staleness.feedback import ErrorFeedback
from petra.staleness.optimizers import LearningRate, require_momentum
from petra.staleness.prediction import Prediction, WeightPrediction
from petra.torch_private import foreach_sub

Version = Mapping[Tensor, Tensor] | None
"""Weights to use instead of a stage's parameters, by parameter; None for the parameters themselves."""

UseWeights = Callable[[Version, Version], None]
"""Sets the weights of a stage's forward and backward passes until the next update (``Stage.use_weights``)."""


@dataclass(frozen=True)
class Remedy:
    """Settings of all remedies. By default all are off.

    Remedies can be combined, except ``compensation`` with ``lookahead``, and ``correction`` with ``predict_backward``.

    Attributes:
        discount: Number of microbatches K over which the learning rate rises from a reduced value; 0 is off
            (:mod:`petra.staleness.discount`).
        correction: Decay D of the weights' average change, which the backward pass subtracts; 0 is off
            (:mod:`petra.staleness.correction`).
        prediction: How passes predict weights (:mod:`petra.staleness.prediction`).
        horizon: Factor h of the number of predicted updates s. Kosson et al. 2021 use 1 or 2.
        compensation: Whether updates compensate spikes (:mod:`petra.staleness.compensation`).
        shrink: Factor β of δ at each boundary with a delay; 1 is off (:mod:`petra.staleness.shrinking`).
        lookahead: Momentum γ of Nesterov's method with discounted gradients; 0 is off (:mod:`petra.staleness.lookahead`).
        predict_backward: Whether backward passes predict weights too, as in SpecTrain (:mod:`petra.staleness.prediction`).
        feedback: Factor c of the extrapolation of updates; 0 is off (:mod:`petra.staleness.feedback`).
        delay_compensation: Factor λ of DC-ASGD's correction; 0 is off (:mod:`petra.engine.options.delay_compensation`).
        braking: Strength ρ of adaptive braking; 0 is off (:mod:`petra.staleness.braking`).

    Raises:
        ConfigError: If a value is out of range or of another type, or two remedies exclude each other.
    """

    discount: int = 0
    correction: float = 0.0
    prediction: Prediction = Prediction.NONE
    horizon: float = 1.0
    compensation: bool = False
    shrink: float = 1.0
    lookahead: float = 0.0
    predict_backward: bool = False
    feedback: float = 0.0
    delay_compensation: float = 0.0
    braking: float = 0.0

    def __post_init__(self) -> None:
        check_types(self, "remedy.")
        require(self.discount >= 0, "remedy.discount", "a number >= 0", self.discount)
        require(0 <= self.correction < 1, "remedy.correction", "a number >= 0 and < 1", self.correction)
        require(0 < self.horizon <= 100, "remedy.horizon", "a number > 0 and <= 100", self.horizon)
        require(0 < self.shrink <= 1, "remedy.shrink", "a number > 0 and <= 1", self.shrink)
        require(0 <= self.lookahead < 1, "remedy.lookahead", "a number >= 0 and < 1", self.lookahead)
        for key in ("feedback", "delay_compensation", "braking"):
            require(0 <= getattr(self, key) < math.inf, f"remedy.{key}", "a number >= 0", getattr(self, key))
        predicts = self.prediction is not Prediction.NONE
        require(predicts or not self.predict_backward, "remedy.predict_backward", "false with remedy.prediction=none", "true")
        # Each of the two sets the weights of backward passes.
        only = not (self.predict_backward and self.correction)
        require(only, "remedy.predict_backward", "false with remedy.correction > 0", "true")
        # Each of the two defines how momentum enters the update.
        both = self.compensation and self.lookahead > 0
        require(not both, "remedy.compensation", "false with remedy.lookahead", "true")

    def check(self, method: Method) -> None:
        """Check that the method allows these remedies.

        Raises:
            ConfigError: If weights are corrected or predicted although the method fixes them.
        """
        through_graphs = method.writes_through_graphs
        free = method.weights is Weights.CURRENT and not through_graphs
        for key in ("correction", "predict_backward"):
            expected = (
                f"{'0' if key == 'correction' else 'false'} unless method.weights=current and method.keep is input or nothing"
            )
            require(free or not getattr(self, key), f"remedy.{key}", expected, getattr(self, key))
        if self.delay_compensation:
            old = method.weights is not Weights.CURRENT
            expected = "0 with method.weights=current, whose gradients belong to the current weights"
            require(old, "remedy.delay_compensation", expected, self.delay_compensation)
        if self.prediction is not Prediction.NONE:
            fits = method.weights is not Weights.DOUBLE and not through_graphs
            expected = "none with method.weights=double, and with method.weights=current and method.keep=graph"
            require(fits, "remedy.prediction", expected, self.prediction)

    def learning_rate(self, rate: LearningRate | None, staleness: float) -> LearningRate | None:
        """Return the learning rate of a stage with this staleness.

        Raises:
            ConfigError: If ``rate`` is None although ``discount`` or ``lookahead`` changes it.
        """
        if not (self.discount or self.lookahead):
            return rate
        if rate is None:
            raise invalid("learning_rate", "a function with remedy.discount or remedy.lookahead", None)
        if self.lookahead:
            rate = lookahead.scaled(rate, self.lookahead)
        return discounted(rate, self.discount, staleness) if self.discount else rate

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Check that the remedies support an optimizer, and set the momentum that ``lookahead`` needs.

        Raises:
            ConfigError: If a remedy is not defined for this optimizer.
        """
        if self.lookahead:
            lookahead.set_momentum(optimizer, self.lookahead)
        if self.compensation:
            require_momentum("compensation", optimizer)
        if self.braking:
            require_average(optimizer)
        of_momentum = self.prediction in (Prediction.VELOCITY, Prediction.DECAYING)
        if of_momentum and not isinstance(optimizer, torch.optim.Adam):
            require_momentum("prediction", optimizer, "adam, adamw, or ")

    def attach(
        self, use_weights: UseWeights, optimizer: torch.optim.Optimizer, staleness: float, until_first: float
    ) -> StageRemedy | None:
        """Attach the remedies that act at updates to the optimizer of a stage.

        Args:
            use_weights: Receives the predicted and the corrected weights after each update.
            optimizer: The stage's optimizer.
            staleness: Staleness s of the stage, in updates.
            until_first: Number of updates from the stage's backward pass of a microbatch to the first stage's.

        Returns:
            The attached remedies, or None if none of them acts at this stage's updates.

        Raises:
            ConfigError: If a remedy is not defined for this optimizer.
        """
        self.prepare_optimizer(optimizer)
        stale = staleness > 0 and (self.correction > 0 or self.prediction is not Prediction.NONE or self.feedback > 0)
        ahead = self.predict_backward and until_first > 0
        acts = stale or ahead or self.compensation or self.braking > 0
        return StageRemedy(self, use_weights, optimizer, staleness, until_first) if acts else None


class StageRemedy:
    """Remedies at the updates of one stage. They run before and after each step of the optimizer.

    Args:
        remedy: The settings.
        use_weights: Receives the predicted and the corrected weights after each update.
        optimizer: The stage's optimizer.
        staleness: Staleness s of the stage, in updates.
        until_first: Number of updates from the stage's backward pass of a microbatch to the first stage's.
    """

    def __init__(
        self, remedy: Remedy, use_weights: UseWeights, optimizer: torch.optim.Optimizer, staleness: float, until_first: float
    ) -> None:
        self._use_weights, self._optimizer = use_weights, optimizer
        self._parameters: list[Tensor] = [p for group in optimizer.param_groups for p in group["params"]]
        stale, s = staleness > 0, staleness
        self._braking = AdaptiveBraking(optimizer, remedy.braking) if remedy.braking else None
        self._compensation = SpikeCompensation(optimizer, s) if remedy.compensation else None
        self._feedback = ErrorFeedback(self._parameters, remedy.feedback * s) if stale and remedy.feedback else None
        self._correction = Correction(self._parameters, remedy.correction, s) if stale and remedy.correction else None
        ahead = until_first if remedy.predict_backward else 0.0
        self._backward_updates, self._forward_updates = remedy.horizon * ahead, remedy.horizon * (s + ahead)
        self._prediction = None
        if self._forward_updates and remedy.prediction is not Prediction.NONE:
            self._prediction = WeightPrediction(self._parameters, optimizer, remedy.prediction)
        self._predicts_change = self._prediction is not None and self._prediction.uses_change
        self._before: list[Tensor] = []
        optimizer.register_step_pre_hook(self._before_step)
        optimizer.register_step_post_hook(self._after_step)

    def state(self) -> dict[str, dict[Tensor, Tensor]]:
        """Return the state that next updates depend on besides weights and optimizer state, by kind and then by parameter."""
        drift = self._correction.drift if self._correction is not None else []
        change = self._prediction.change if self._prediction is not None else []
        feedback = self._feedback.previous if self._feedback is not None else []
        kinds = {"drift": drift, "change": change, "feedback": feedback}
        return {kind: dict(zip(self._parameters, values, strict=True)) for kind, values in kinds.items() if values}

    def resume(self, state: Mapping[str, Mapping[Tensor, Tensor]]) -> None:
        """Restore a :meth:`state`, after weights and optimizer have been loaded.

        After a change of partition, a parameter may come from a stage without staleness, which had no state. Its state is zero.
        """
        if self._correction is not None:
            self._correction.drift = self._restored(state.get("drift"))
        if self._prediction is not None and self._predicts_change:
            self._prediction.change = self._restored(state.get("change"))
        if self._feedback is not None:
            self._feedback.previous = self._restored(state.get("feedback"))
        self._set_weights()

    def _restored(self, values: Mapping[Tensor, Tensor] | None) -> list[Tensor]:
        if not values:
            return []
        return [values[p].to(p, copy=True) if p in values else torch.zeros_like(p) for p in self._parameters]

    @torch.no_grad()
    def _before_step(self, *_: Any) -> None:
        if self._braking is not None:
            self._braking.before_step()
        if self._compensation is not None:
            self._compensation.before_step()
        if self._correction is not None or self._predicts_change or self._feedback is not None:
            self._before = [p.clone() for p in self._parameters]

    @torch.no_grad()
    def _after_step(self, *_: Any) -> None:
        if self._compensation is not None:
            self._compensation.after_step()
        if self._feedback is not None:
            change = list(foreach_sub(self._parameters, self._before))
            self._feedback.after_step(change, getattr(self._optimizer, "found_inf", None))
        if self._correction is not None or self._predicts_change:
            change = list(foreach_sub(self._parameters, self._before))
            if self._correction is not None:
                self._correction.update(change)
            if self._prediction is not None and self._predicts_change:
                self._prediction.change = change
        self._before = []
        self._set_weights()

    @torch.no_grad()
    def _set_weights(self) -> None:
        """Set the weights that forward and backward passes use until the next update."""
        predicted = self._by_parameter(None if self._prediction is None else self._prediction.weights(self._forward_updates))
        corrected = self._by_parameter(None if self._correction is None else self._correction.weights())
        if self._prediction is not None and self._backward_updates:
            same = self._backward_updates == self._forward_updates  # The last stage differentiates the graph of its forward pass.
            corrected = predicted if same else self._by_parameter(self._prediction.weights(self._backward_updates))
        self._use_weights(predicted, corrected)

    def _by_parameter(self, weights: Sequence[Tensor] | None) -> dict[Tensor, Tensor] | None:
        if weights is None:
            return None
        return {p: w.requires_grad_() for p, w in zip(self._parameters, weights, strict=True)}
