"""Remedies for stale gradients (:class:`petra.engine.options.remedy.Remedy`), one module for each."""

from petra.staleness.combine import remedies
from petra.staleness.correction import Correction
from petra.staleness.discount import Discount
from petra.staleness.feedback import Feedback
from petra.staleness.prediction import WeightPrediction

__all__ = ["Correction", "Discount", "Feedback", "WeightPrediction", "remedies"]
