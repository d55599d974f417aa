"""Sums of the reports of microbatches over a run, and the result computed from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isfinite
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import Tensor

from petra.engine.metrics import Metric, values_of
from petra.errors import NumericsError

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

    def finite(self, stage: int, first: int, last: int, rank: int) -> Result:
        """Return the result, after a check that the loss is finite.

        Args:
            stage: Number of the last stage, from 1.
            first, last: Numbers of the first and the last microbatch, from 1.
            rank: This rank. The error of rank 0 is the one to report.

        Raises:
            NumericsError: If it is not.
        """
        if not isfinite(self.loss):
            raise NumericsError(
                f"stage {stage}: the loss is not finite in microbatches {first} to {last}; lower optim.lr or set optim.clip",
                origin=rank == 0,
            )
        return self


def reduce_totals(totals: Tensor, metrics: Mapping[str, Metric], distributed: bool, replicas: Replicas | None) -> Result:
    """All-reduce summed reports and return the means over targets, or zeros if no target counts."""
    totals = totals.cpu()
    if replicas is not None:
        replicas.total(totals)
    elif distributed:
        dist.all_reduce(totals)
    targets, loss, *sums = totals.tolist()
    return Result(int(targets), loss / max(targets, 1), *values_of(metrics, targets, sums))
