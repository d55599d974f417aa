"""Sums of the reports of microbatches over a run, and the result computed from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import Tensor

from petra.engine.metrics import Metric, values_of

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
    """

    targets: int
    loss: float
    metrics: dict[str, float]
    counts: dict[str, list[int]] = field(default_factory=dict)


def reduce_totals(totals: Tensor, metrics: Mapping[str, Metric], distributed: bool, replicas: Replicas | None) -> Result:
    """All-reduce summed reports and return the means over targets, or zeros if no target counts."""
    totals = totals.cpu()
    if replicas is not None:
        replicas.total(totals)
    elif distributed:
        dist.all_reduce(totals)
    targets, loss, *sums = totals.tolist()
    return Result(int(targets), loss / max(targets, 1), *values_of(metrics, targets, sums))
