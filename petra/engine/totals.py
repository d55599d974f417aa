"""Sums of the reports of microbatches over a run, and the result computed from them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from petra.distributed import all_gather_objects
from petra.engine.metrics import Metric, VectorMetric, size_of, values_of
from petra.engine.worker import Worker
from petra.errors import NumericsError

if TYPE_CHECKING:
    from petra.engine.options.replicas import Replicas

log = logging.getLogger(__name__)


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


class Totals:
    """Sum of the reports (:class:`petra.engine.endpoints.LossPort`) of one ``train()`` call.

    Args:
        metrics: Metrics by name.
        dp: Number of replicas, each of which reports on its share of a microbatch.
    """

    def __init__(self, metrics: Mapping[str, Metric], dp: int, device: torch.device) -> None:
        self.values = torch.zeros(2 + sum(map(size_of, metrics.values())), dtype=torch.float64, device=device)
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


def warn_without_update(k: int, microbatches: int, rank: int, *, watched: bool) -> None:
    """Log a warning on rank 0 if a training call ended before the first update.

    A caller that watches or stops training, such as :class:`petra.training.Trainer`, may end a call before an update on purpose.
    """
    if 0 < microbatches < k and rank == 0 and not watched:
        log.warning("k=%d: no update yet, after %d microbatches; the weights have not changed", k, microbatches)


def reduce_totals(totals: Tensor, metrics: Mapping[str, Metric], distributed: bool, replicas: Replicas | None) -> Result:
    """All-reduce summed reports and return the means over targets, or zeros if no target counts."""
    totals = totals.cpu()
    if replicas is not None:
        replicas.total(totals)
    elif distributed:
        dist.all_reduce(totals)
    targets, loss, *sums = totals.tolist()
    return Result(int(targets), loss / max(targets, 1), *values_of(metrics, targets, sums))


def combined(parts: Sequence[Result], metrics: Mapping[str, Metric]) -> Result:
    """Return the result over all targets of several :meth:`petra.Pipeline.train` calls."""
    if len(parts) == 1:
        return parts[0]
    targets = sum(part.targets for part in parts)

    def over(values: Sequence[float]) -> float:
        return sum(value * part.targets for value, part in zip(values, parts, strict=True)) / max(targets, 1)

    found, counts = dict[str, float](), dict[str, list[int]]()
    for name, metric in metrics.items():
        if isinstance(metric, VectorMetric):
            counts[name] = [sum(column) for column in zip(*(part.counts[name] for part in parts), strict=True)]
            found[name] = metric.value(counts[name])
        else:
            found[name] = over([part.metrics[name] for part in parts])
    return Result(targets, over([part.loss for part in parts]), found, counts)


def gather_stage_metrics(
    workers: Mapping[int, Worker], measures: Sequence[Callable[[], dict[str, float]]], processes: int
) -> dict[str, float]:
    """All-gather the metrics of stages, as ``stage/<j>/<name>`` with j from 1. Every rank must call this function.

    Args:
        workers: Workers of this rank's stages.
        measures: Functions that return further metrics of this rank by name.
        processes: Number of processes of a replica; those of the first replica are returned.
    """
    own = {f"stage/{j + 1}/{key}": v for j, worker in workers.items() for key, v in worker.update.metrics().items()}
    own |= {key: value for measure in measures for key, value in measure().items()}
    return {key: value for part in all_gather_objects(own)[:processes] for key, value in part.items()}
