"""Remedies for stale gradients, one module for each, and the settings that combine them."""

from petra.staleness.prediction import Prediction
from petra.staleness.remedy import Remedy, StageRemedy

__all__ = ["Prediction", "Remedy", "StageRemedy"]
