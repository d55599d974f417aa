"""Sums of the reports of microbatches over a run, and the result computed from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import Tensor

from petra.engine.metrics import Metric, VectorMetric, size_of

if TYPE_CHECKING:
    from petra.engine.options.replicas import Replicas


@dataclass(frozen=True)
class Result:
    """Loss and metrics of one ``train()`` or ``evaluate()`` call, averaged over targets.

    Attributes:
        targets: Number of targets that are not ignored.
        loss: Mean loss.
        metrics: Values of the metrics by name.
        counts: Counts of the vector metrics by name, such as a confusion matrix row by row.
        sums: A report (:class:`petra.engine.endpoints.LossPort`), the sum of those of all microbatches.
    """

    targets: int
    loss: float
    metrics: dict[str, float]
    counts: dict[str, list[int]] = field(default_factory=dict)
    sums: Sequence[float] = ()

    @classmethod
    def of(cls, sums: Sequence[float], metrics: Mapping[str, Metric]) -> Result:
        """Return the means over targets, or zeros if no target counts."""
        targets, loss, *rest = sums
        values, counts = dict[str, float](), dict[str, list[int]]()
        for name, metric in metrics.items():
            own, rest = rest[: size_of(metric)], rest[size_of(metric) :]
            if isinstance(metric, VectorMetric):
                values[name], counts[name] = metric.value(own), [int(count) for count in own]
            else:
                values[name] = own[0] / max(targets, 1)
        return cls(int(targets), loss / max(targets, 1), values, counts, sums)


def reduce_totals(totals: Tensor, metrics: Mapping[str, Metric], distributed: bool, replicas: Replicas | None) -> Result:
    """All-reduce summed reports and return their result."""
    totals = totals.cpu()
    if replicas is not None:
        replicas.total(totals)
    elif distributed:
        dist.all_reduce(totals)
    return Result.of(totals.tolist(), metrics)
