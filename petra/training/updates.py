"""Numbers between the ends of epochs: means over a fixed number of updates."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor

from petra.engine.metrics import Metric, correct_predictions, values_of
from petra.errors import require
from petra.training.loggers import Logger

ACCURACY: Mapping[str, Metric] = MappingProxyType({"accuracy": correct_predictions})
"""The metrics of a pipeline by default."""


class UpdateLog:
    """Adds up the reports of microbatches (:class:`petra.engine.endpoints.Objective`) and logs their means every ``every`` updates.

    A row has the entries ``microbatches``, ``updates``, ``update/loss``, ``update/<metric>`` and ``update/learning_rate``.

    Args:
        every: Number of updates between two rows.
        k: Number of microbatches per update.
        learning_rate: Learning rate as a function of microbatches.
        metrics: Metrics by name. In a report they follow the number of targets and the loss.
        loggers: Receivers of the rows.
        measure: Returns further entries of a row.

    Attributes:
        totals: Sum of the reports since the last row: number of targets, sum of the losses, sums of the metrics.

    Raises:
        ConfigError: If ``every`` < 1.
    """

    def __init__(
        self,
        every: int,
        k: int,
        learning_rate: Callable[[int], float],
        metrics: Mapping[str, Metric] = ACCURACY,
        loggers: Sequence[Logger] = (),
        measure: Callable[[], dict[str, float]] = dict,
    ) -> None:
        require(every >= 1, "trainer.log_every", "null or an integer >= 1", every)
        self._microbatches, self._k = every * k, k
        self._learning_rate, self._metrics, self._loggers, self._measure = learning_rate, metrics, loggers, measure
        self._clock = 0
        self._sum: Tensor | Sequence[float] = ()  # Reading a tensor synchronizes with the device.

    @property
    def totals(self) -> list[float]:
        return self._sum.tolist() if isinstance(self._sum, Tensor) else list(self._sum)

    def resume(self, clock: int, totals: Sequence[float]) -> None:
        """Continue after ``clock`` microbatches with the ``totals`` of that time."""
        self._clock, self._sum = clock, totals

    def microbatch(self, report: Tensor) -> None:
        """Add the report of a microbatch that has completed."""
        if not isinstance(self._sum, Tensor):
            self._sum = report.new_tensor(self._sum) if self._sum else torch.zeros_like(report)
        self._sum += report
        self._clock += 1
        if self._clock % self._microbatches:
            return
        targets, loss, *sums = self.totals
        self._sum = ()
        means = {"loss": loss / max(targets, 1), **values_of(self._metrics, targets, sums)}
        row = {
            "microbatches": self._clock,
            "updates": self._clock // self._k,
            **{f"update/{name}": value for name, value in means.items()},
            "update/learning_rate": self._learning_rate(self._clock),
            **self._measure(),
        }
        for logger in self._loggers:
            logger.log(row)
