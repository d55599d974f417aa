"""Remedies for stale gradients (:class:`petra.Extension`), one module for each."""

from __future__ import annotations

from typing import Annotated, Literal

from petra.engine.options.extension import Extension
from petra.errors import Share
from petra.staleness.correction import Correction
from petra.staleness.discount import Discount
from petra.staleness.feedback import Feedback
from petra.staleness.prediction import WeightPrediction

__all__ = ["Correction", "Discount", "Feedback", "WeightPrediction", "remedies"]


def remedies(
    discount: int = 0,
    correction: Share = 0.0,
    prediction: Literal["none", "velocity", "difference"] = "none",
    feedback: Annotated[float, ">= 0"] = 0.0,
) -> tuple[Extension, ...]:
    """Return the remedies of a configuration, without those that are off.

    Args:
        discount: Number of microbatches over which a stage's learning rate rises from lr / s to lr, where s is its staleness in
            updates; 0: off.
        correction: The backward pass subtracts s times the average change of the weights per update, a moving average with this
            decay per s updates; >= 0 and < 1; 0: off.
        prediction: Prediction of the weights for the forward pass: none, velocity (from the optimizer) or difference (from the
            last update).
        feedback: Extrapolate each update by this factor times s from the last two updates; >= 0; 0: off.

    Raises:
        ConfigError: If a value is out of range or of another type.
    """
    found: list[Extension] = []
    if discount:
        found.append(Discount(discount))
    if feedback:
        found.append(Feedback(feedback))
    if correction:
        found.append(Correction(correction))
    if prediction != "none":
        found.append(WeightPrediction(prediction))
    return tuple(found)
