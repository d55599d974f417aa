"""Sums the reports of microbatches over a run and turns them into means, on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Result:
    """Loss and metrics of one ``train()`` or ``evaluate()`` call, averaged over targets."""

    targets: int
    loss: float
    metrics: dict[str, float]


def reduce_totals(totals: Tensor, metrics: Sequence[str], distributed: bool) -> Result:
    """All-reduce summed reports (:class:`petra.engine.endpoints.Objective`) and return their means; zeros if no target counts."""
    totals = totals.cpu()
    if distributed:
        dist.all_reduce(totals)
    targets, *sums = totals.tolist()
    loss, *means = (s / max(targets, 1) for s in sums)
    return Result(int(targets), loss, dict(zip(metrics, means, strict=True)))
