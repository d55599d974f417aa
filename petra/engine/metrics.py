"""Metrics: sums over the targets of a microbatch, such as the number of correct predictions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from petra.errors import ModelError, invalid, require
from petra.specs import IGNORED, TensorSpec, are_integers

Metric = Callable[[Tensor, Tensor], Tensor]
"""Function of (output, targets) that returns a sum over the targets that are not ignored.

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
        return (targets != IGNORED).sum()
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


@dataclass(frozen=True)
class MeanOutput:
    """A loss or a metric of mean outputs, for samples that have several rows of a microbatch, such as ten crops of an image.

    Attributes:
        function: Function of (output, targets).
        rows: Number of consecutive rows of a sample. The first has its target, and the others are ignored.
    """

    function: Metric
    rows: int

    def __call__(self, output: Tensor, targets: Tensor) -> Tensor:
        """Return the function of the mean outputs of the samples."""
        return self.function(output.view(-1, self.rows, *output.shape[1:]).mean(1), targets[:: self.rows])


def size_of(metric: Metric) -> int:
    """Return the number of entries of a metric in a report."""
    return metric.size if isinstance(metric, VectorMetric) else 1


def require_metrics(metrics: object) -> None:
    """Check the metrics of a pipeline.

    Raises:
        ConfigError: If they are not functions by name.
    """
    named = isinstance(metrics, Mapping) and all(isinstance(name, str) for name in metrics)
    require(named, "metrics", "functions by name", repr(metrics))
    assert isinstance(metrics, Mapping)
    for name, metric in metrics.items():
        require(callable(metric), f"metrics[{name!r}]", "a function of output and targets", repr(metric))


def values_of(
    metrics: Mapping[str, Metric], targets: float, sums: Sequence[float]
) -> tuple[dict[str, float], dict[str, list[int]]]:
    """Return the values of metrics by name, and the counts of the vector metrics by name.

    Args:
        metrics: Metrics by name.
        targets: Number of targets.
        sums: Sums of all metrics, in the order of ``metrics``.
    """
    values, counts, rest = dict[str, float](), dict[str, list[int]](), list(sums)
    for name, metric in metrics.items():
        own, rest = rest[: size_of(metric)], rest[size_of(metric) :]
        if isinstance(metric, VectorMetric):
            values[name], counts[name] = metric.value(own), [int(count) for count in own]
        else:
            values[name] = own[0] / max(targets, 1)
    return values, counts
