"""Confusion matrix, and the mean intersection over union that is computed from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from petra.engine.metrics import require_classes
from petra.errors import Count, ModelError, check_types, require
from petra.specs import IGNORED


@dataclass(frozen=True)
class ConfusionMatrix:
    """Counts of targets by class and prediction. Its value is the mean intersection over union (mIoU) of the classes.

    Attributes:
        classes: Number of classes C.

    Raises:
        ConfigError: If it is no integer >= 1.
    """

    classes: Count

    def __post_init__(self) -> None:
        check_types(self)

    @property
    def size(self) -> int:
        """Number of counts in a report."""
        return self.classes**2

    def __call__(self, output: Tensor, targets: Tensor) -> Tensor:
        """Return int64 counts (C·C,), row by row: entry c·C + p counts targets of class c for which p has the highest score.

        Args:
            output: Scores, (B, C, ...).
            targets: Classes or -100, (B, ...).
        """
        require_classes("miou", targets)
        classes, targets = output.shape[1], targets.long()
        require(classes == self.classes, "metric miou", f"scores of {self.classes} classes", classes, ModelError)
        counted = targets != IGNORED
        # Ignored targets have a bin of their own, because selecting the others would wait for a GPU.
        bins = torch.where(counted, targets * self.classes + output.argmax(1), self.size).flatten()
        counts = torch.zeros(self.size + 1, dtype=torch.int64, device=bins.device)
        return counts.scatter_add_(0, bins, torch.ones_like(bins))[:-1]

    def per_class(self, counts: Sequence[float]) -> list[float]:
        """Return the intersection over union of each class. NaN for a class that is neither target nor prediction."""
        matrix = torch.tensor(counts, dtype=torch.float64).view(self.classes, self.classes)
        intersection = matrix.diagonal()
        found: list[float] = (intersection / (matrix.sum(0) + matrix.sum(1) - intersection)).tolist()
        return found

    def value(self, counts: Sequence[float]) -> float:
        """Return the mean of :meth:`per_class` over the classes that occur, or 0 if none does."""
        values = [iou for iou in self.per_class(counts) if iou == iou]
        return sum(values) / len(values) if values else 0.0
