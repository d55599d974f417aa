"""Sums of the reports of microbatches over a run, and the result computed from them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Result:
    """Loss and metrics of one ``train()`` or ``evaluate()`` call, averaged over targets."""

    targets: int
    loss: float
    metrics: dict[str, float]


class Totals:
    """Sum of the reports (:class:`petra.engine.endpoints.Objective`) of one ``train()`` call.

    Args:
        metrics: Number of metrics in a report.
        dp: Number of replicas, each of which reports on its share of a microbatch.
    """

    def __init__(self, metrics: int, dp: int, device: torch.device) -> None:
        self.values = torch.zeros(2 + metrics, dtype=torch.float64, device=device)
        self._dp = dp
        self._on_microbatch: Callable[[Tensor], None] | None = None

    def start(self, on_microbatch: Callable[[Tensor], None] | None) -> None:
        """Set the sums to zero, and pass each report to ``on_microbatch`` from now on. A share's report is multiplied by ``dp``."""
        self.values.zero_()
        self._on_microbatch = on_microbatch

    def add(self, report: Tensor) -> None:
        """Add the report of a microbatch whose backward has ended at the first stage."""
        self.values += report
        if self._on_microbatch is not None:
            self._on_microbatch(self._dp * report if self._dp > 1 else report)


def reduce_totals(totals: Tensor, metrics: Sequence[str], distributed: bool) -> Result:
    """All-reduce summed reports and return the means over targets, or zeros if no target counts."""
    totals = totals.cpu()
    if distributed:
        dist.all_reduce(totals)
    targets, *sums = totals.tolist()
    loss, *means = (s / max(targets, 1) for s in sums)
    return Result(int(targets), loss, dict(zip(metrics, means, strict=True)))
