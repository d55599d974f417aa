"""Settings of the remedies for stale gradients, and the remedies that act at a stage's updates.

The gradients of a stage are s = τ / k updates old on average (:meth:`petra.method.Method.staleness`). Remedies act when the weights
change, or scale the learning rate or δ. They add no work to forward and backward passes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from petra.errors import invalid, require
from petra.method import Method, Weights
from petra.staleness import lookahead
from petra.staleness.compensation import SpikeCompensation
from petra.staleness.correction import Correction
from petra.staleness.discount import discounted
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

    Remedies can be combined, except ``compensation`` with ``lookahead``.

    Attributes:
        discount: Number of microbatches K over which the learning rate rises from a reduced value; 0 is off
            (:mod:`petra.staleness.discount`).
        correction: Decay D of the weights' average change, which the backward pass subtracts; 0 is off
            (:mod:`petra.staleness.correction`).
        prediction: How the forward pass predicts weights (:mod:`petra.staleness.prediction`).
        horizon: Factor h of the number of predicted updates s. Kosson et al. 2021 use 1 or 2.
        compensation: Whether updates compensate spikes (:mod:`petra.staleness.compensation`).
        shrink: Factor β of δ at each boundary with a delay; 1 is off (:mod:`petra.staleness.shrinking`).
        lookahead: Momentum γ of Nesterov's method with discounted gradients; 0 is off (:mod:`petra.staleness.lookahead`).

    Raises:
        ConfigError: If a value is out of range, or two remedies exclude each other.
    """

    discount: int = 0
    correction: float = 0.0
    prediction: Prediction = Prediction.NONE
    horizon: float = 1.0
    compensation: bool = False
    shrink: float = 1.0
    lookahead: float = 0.0

    def __post_init__(self) -> None:
        require(self.discount >= 0, "remedy.discount", "a number >= 0", self.discount)
        require(0 <= self.correction < 1, "remedy.correction", "a number >= 0 and < 1", self.correction)
        require(0 < self.horizon <= 100, "remedy.horizon", "a number > 0 and <= 100", self.horizon)
        require(0 < self.shrink <= 1, "remedy.shrink", "a number > 0 and <= 1", self.shrink)
        require(0 <= self.lookahead < 1, "remedy.lookahead", "a number >= 0 and < 1", self.lookahead)
        # Each of the two defines how momentum enters the update.
        both = self.compensation and self.lookahead > 0
        require(not both, "remedy.compensation", "false with remedy.lookahead", "true")

    def check(self, method: Method) -> None:
        """Check that the method allows these remedies.

        Raises:
            ConfigError: If weights are corrected or predicted although the method fixes them.
        """
        through_graphs = method.writes_through_graphs
        if self.correction:
            fits = method.weights is Weights.CURRENT and not through_graphs
            expected = "0 unless method.weights=current and method.keep is input or nothing"
            require(fits, "remedy.correction", expected, self.correction)
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
        if self.prediction is Prediction.VELOCITY and not isinstance(optimizer, torch.optim.Adam):
            require_momentum("prediction", optimizer, "adam, adamw, or ")

    def attach(self, use_weights: UseWeights, optimizer: torch.optim.Optimizer, staleness: float) -> StageRemedy | None:
        """Attach the remedies that act at updates to the optimizer of a stage.

        Args:
            use_weights: Receives the predicted and the corrected weights after each update.
            optimizer: The stage's optimizer.
            staleness: Staleness s of the stage, in updates.

        Returns:
            The attached remedies, or None if none of them acts at this stage's updates.

        Raises:
            ConfigError: If a remedy is not defined for this optimizer.
        """
        self.prepare_optimizer(optimizer)
        changes_weights = staleness > 0 and (self.correction > 0 or self.prediction is not Prediction.NONE)
        return StageRemedy(self, use_weights, optimizer, staleness) if changes_weights or self.compensation else None


class StageRemedy:
    """Remedies at the updates of one stage. They run before and after each step of the optimizer.

    Args:
        remedy: The settings.
        use_weights: Receives the predicted and the corrected weights after each update.
        optimizer: The stage's optimizer.
        staleness: Staleness s of the stage, in updates.
    """

    def __init__(self, remedy: Remedy, use_weights: UseWeights, optimizer: torch.optim.Optimizer, staleness: float) -> None:
        self._use_weights = use_weights
        self._parameters: list[Tensor] = [p for group in optimizer.param_groups for p in group["params"]]
        stale = staleness > 0
        self._compensation = SpikeCompensation(optimizer, staleness) if remedy.compensation else None
        self._correction = Correction(self._parameters, remedy.correction, staleness) if stale and remedy.correction else None
        self._prediction = None
        if stale and remedy.prediction is not Prediction.NONE:
            steps = staleness * remedy.horizon
            self._prediction = WeightPrediction(self._parameters, optimizer, remedy.prediction, steps)
        self._predicts_change = self._prediction is not None and self._prediction.uses_change
        self._before: list[Tensor] = []
        optimizer.register_step_pre_hook(self._before_step)
        optimizer.register_step_post_hook(self._after_step)

    def state(self) -> dict[str, dict[Tensor, Tensor]]:
        """Return the state that next updates depend on besides weights and optimizer state, by kind and then by parameter."""
        drift = self._correction.drift if self._correction is not None else []
        change = self._prediction.change if self._prediction is not None else []
        kinds = {"drift": drift, "change": change}
        return {kind: dict(zip(self._parameters, values, strict=True)) for kind, values in kinds.items() if values}

    def resume(self, state: Mapping[str, Mapping[Tensor, Tensor]]) -> None:
        """Restore a :meth:`state`, after weights and optimizer have been loaded.

        After a change of partition, a parameter may come from a stage without staleness, which had no state. Its state is zero.
        """
        if self._correction is not None:
            self._correction.drift = self._restored(state.get("drift"))
        if self._prediction is not None and self._predicts_change:
            self._prediction.change = self._restored(state.get("change"))
        self._set_weights()

    def _restored(self, values: Mapping[Tensor, Tensor] | None) -> list[Tensor]:
        if not values:
            return []
        return [values[p].to(p, copy=True) if p in values else torch.zeros_like(p) for p in self._parameters]

    @torch.no_grad()
    def _before_step(self, *_: Any) -> None:
        if self._compensation is not None:
            self._compensation.before_step()
        if self._correction is not None or self._predicts_change:
            self._before = [p.clone() for p in self._parameters]

    @torch.no_grad()
    def _after_step(self, *_: Any) -> None:
        if self._compensation is not None:
            self._compensation.after_step()
        if self._before:
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
        predicted = self._by_parameter(None if self._prediction is None else self._prediction.weights())
        corrected = self._by_parameter(None if self._correction is None else self._correction.weights())
        self._use_weights(predicted, corrected)

    def _by_parameter(self, weights: Sequence[Tensor] | None) -> dict[Tensor, Tensor] | None:
        if weights is None:
            return None
        return {p: w.requires_grad_() for p, w in zip(self._parameters, weights, strict=True)}
