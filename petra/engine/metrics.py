"""Metrics: sums over the targets of a microbatch, such as the number of correct predictions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from petra.errors import ModelError, invalid
from petra.specs import IGNORED, TensorSpec, are_integers

Metric = Callable[..., Tensor]
"""Function of (output, targets), as a loss, that returns a sum over the targets that are not ignored.

The sum is a scalar, whose value is its mean over targets, or the counts of a :class:`VectorMetric`.
"""


@runtime_checkable
class VectorMetric(Protocol):
    """A metric that returns a vector of counts, such as a confusion matrix, and computes its value from their sums.

    The sums are exact: reports add them up in float64, which represents integers up to 2^53.
    """

    @property
    def size(self) -> int:
        """Number of counts."""

    def __call__(self, output: Tensor, targets: Tensor) -> Tensor: ...

    def value(self, counts: Sequence[float]) -> float:
        """Return the value for the sums of the counts."""


def count_targets(targets: Tensor) -> Tensor:
    """Return the number of targets that are not ignored."""
    integers = are_integers(targets)
    if integers and targets.dtype.is_signed:
        return torch.count_nonzero(targets != IGNORED)
    count = targets.numel() if integers else len(targets)
    return torch.full((), count, device=targets.device)  # torch.tensor would copy the number and wait for a GPU


def correct_predictions(output: Tensor, targets: Tensor) -> Tensor:
    """Return the number of targets that have the highest score. Classes are dimension 1 of the output.

    Raises:
        ModelError: If the targets are not integers.
    """
    require_classes("accuracy", targets)
    return (output.argmax(1) == targets).sum()


def top5_correct(output: Tensor, targets: Tensor) -> Tensor:
    """Return the number of targets among the five highest scores. Classes are dimension 1 of the output, and more than five.

    Raises:
        ModelError: If the targets are not integers.
    """
    require_classes("top5", targets)
    return (output.topk(5, 1).indices == targets.unsqueeze(1)).sum()


def require_classes(name: str, targets: Tensor) -> None:
    """Check that targets are integers.

    Raises:
        ModelError: If they are not. The message names the metric.
    """
    if targets.is_floating_point():
        expected = "integer targets (for others, pass metrics= to Recipe; metrics={} computes none)"
        raise invalid(f"metric {name}", expected, TensorSpec(tuple(targets.shape), targets.dtype), ModelError)


def size_of(metric: Metric) -> int:
    """Return the number of entries of a metric in a report."""
    return metric.size if isinstance(metric, VectorMetric) else 1
