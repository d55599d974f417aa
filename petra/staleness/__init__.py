"""Remedies for stale gradients."""

from petra.staleness.remedies import Prediction, Remedy, StageRemedy

__all__ = ["Prediction", "Remedy", "StageRemedy"]
