"""The result of a run, computed from the sum of the reports of its microbatches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from petra.engine.metrics import Metric, VectorMetric, size_of


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
