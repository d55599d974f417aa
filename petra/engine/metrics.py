"""Metrics: sums over the targets of a microbatch, such as the number of correct predictions or a confusion matrix."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from petra.errors import ModelError, invalid, require
from petra.specs import IGNORED, TensorSpec, are_integers

Metric = Callable[[Tensor, Tensor], Tensor]
"""Function of (output, targets) that returns a sum over the targets that are not ignored.

The sum is a scalar, whose value is its mean over targets, or a vector of counts, whose value the metric computes itself
(:class:`ConfusionMatrix`).
"""


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
    _require_classes("accuracy", targets)
    return (output.argmax(1) == targets).sum()


def top5_correct(output: Tensor, targets: Tensor) -> Tensor:
    """Return the number of targets among the five highest scores. Classes are dimension 1 of the output, and more than five.

    Raises:
        ModelError: If the targets are not integers.
    """
    _require_classes("top5", targets)
    return (output.topk(5, 1).indices == targets.unsqueeze(1)).sum()


def _require_classes(name: str, targets: Tensor) -> None:
    if targets.is_floating_point():
        expected = "integer targets (for others, pass metrics= to Pipeline; metrics={} computes none)"
        raise invalid(f"metric {name}", expected, TensorSpec(tuple(targets.shape), targets.dtype), ModelError)


@dataclass(frozen=True)
class ConfusionMatrix:
    """Counts of targets by class and prediction. Its value is the mean intersection over union (mIoU) of the classes.

    The counts are exact: reports add them up in float64, which represents integers up to 2^53.

    Attributes:
        classes: Number of classes C.
    """

    classes: int

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
        _require_classes("miou", targets)
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
    return metric.size if isinstance(metric, ConfusionMatrix) else 1


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


def values_of(metrics: Mapping[str, Metric], targets: float, sums: Sequence[float]) -> dict[str, float]:
    """Return the values of metrics by name.

    Args:
        metrics: Metrics by name.
        targets: Number of targets.
        sums: Sums of all metrics, in the order of ``metrics``.
    """
    found, rest = dict[str, float](), list(sums)
    for name, metric in metrics.items():
        own, rest = rest[: size_of(metric)], rest[size_of(metric) :]
        found[name] = metric.value(own) if isinstance(metric, ConfusionMatrix) else own[0] / max(targets, 1)
    return found


def counts_of(metrics: Mapping[str, Metric], sums: Sequence[float]) -> dict[str, list[int]]:
    """Return the counts of the vector metrics by name. Arguments as for :func:`values_of`."""
    found, rest = dict[str, list[int]](), list(sums)
    for name, metric in metrics.items():
        own, rest = rest[: size_of(metric)], rest[size_of(metric) :]
        if isinstance(metric, ConfusionMatrix):
            found[name] = [int(count) for count in own]
    return found
