"""Measures how far a stage's weights move between the forward and the backward pass of a microbatch."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from math import gcd
from statistics import mean

import torch
from torch import Tensor

from petra.errors import require
from petra.hooks import Hook
from petra.pipeline import Pipeline
from petra.specs import Streams

LARGEST_SAMPLE = 2**16
"""Largest number of entries of a parameter that are compared."""
RECENT = 8
"""Number of measurements in the mean that :meth:`WeightDrift.of_first_stage` returns."""
GOLDEN = 0.618
"""Golden ratio, whose first multiples are already spread evenly modulo 1."""


@dataclass
class _Measured:
    """Drifts of one stage: the sum since the last report, their number, and the last ones."""

    total: float | Tensor = 0.0
    count: int = 0
    recent: deque[Tensor] = field(default_factory=lambda: deque(maxlen=RECENT))
    samples: dict[int, list[Tensor]] = field(default_factory=dict)
    """Entries of the weights at the forward pass of each microbatch in flight that is measured."""


class WeightDrift(Hook):
    """Measure the relative drift ‖w_B − w_F‖ / ‖w_F‖ of each stage's parameters, every ``every`` microbatches.

    w_F are the parameters at the time of a microbatch's forward pass and w_B those at its backward pass, whichever version of them
    these passes use. At most :data:`LARGEST_SAMPLE` entries of each parameter, at equal distances, are copied and compared. The
    host doesn't wait for the device.

    Args:
        every: Number of microbatches between two measurements.

    Raises:
        ConfigError: If ``every`` < 1.
    """

    def __init__(self, pipeline: Pipeline, every: int) -> None:
        require(every >= 1, "every", "an integer >= 1", every)
        self.pipeline, self.every = pipeline, every
        self._stale = {j: _Measured() for j in pipeline.stages if pipeline.plan.stages[j].staleness > 0}

    def forward_end(self, stage: int, m: int, y: Streams) -> None:
        if (m + 1) % self.every == 0 and stage in self._stale:
            self._stale[stage].samples[m] = [entries.clone() for entries in self._entries(stage)]

    def backward_begin(self, stage: int, m: int, y: Streams, dy: Streams) -> None:
        measured = self._stale.get(stage)
        if measured is None or m not in measured.samples:
            return
        before, now = measured.samples.pop(m), self._entries(stage)
        if not before:
            return
        moved, size = (
            torch.stack([t.double().square().sum() for t in tensors]).sum().sqrt()
            for tensors in ([a - b for a, b in zip(now, before, strict=True)], before)
        )
        drift = torch.where(size > 0, moved / size, torch.zeros_like(size))
        measured.recent.append(drift)
        measured.total, measured.count = measured.total + drift, measured.count + 1

    def metrics(self) -> dict[str, float]:
        """Return, for each stage j from 1 of this process, ``stage/<j>/staleness`` and ``stage/<j>/weight_drift``.

        ``staleness`` is the mean number of updates between forward and backward passes. ``weight_drift`` is the mean since the
        last call, or of the last :data:`RECENT` measurements if there are none since. Checkpoints don't contain measurements, so
        the mean of an epoch that a run resumes covers its rest.
        """
        rows: dict[str, float] = {}
        for j in self.pipeline.stages:
            rows[f"stage/{j + 1}/staleness"] = self.pipeline.plan.stages[j].staleness
            rows[f"stage/{j + 1}/weight_drift"] = self._mean(j)
        return rows

    def of_first_stage(self) -> dict[str, float]:
        """Return the mean of the first stage's last :data:`RECENT` drifts as ``update/weight_drift``.

        The result is empty in processes without this stage, and before its first measurement.
        """
        if 0 not in self.pipeline.stages:
            return {}
        if 0 not in self._stale:
            return {"update/weight_drift": 0.0}
        return {"update/weight_drift": _recent(self._stale[0])} if self._stale[0].recent else {}

    def _mean(self, j: int) -> float:
        measured = self._stale.get(j)
        if measured is None:
            return 0.0
        found = float(measured.total) / measured.count if measured.count else _recent(measured)
        measured.total, measured.count = 0.0, 0
        return found

    def _entries(self, j: int) -> list[Tensor]:
        """Return a view of the sampled entries of each trained parameter of a stage."""
        parameters = (p.detach() for p in self.pipeline.stages[j].gradients.parameters)
        return [_strided(p) for p in parameters if p.numel()]


def distance(k: int, updates: int) -> int:
    """Return a number of microbatches between measurements: about ``updates`` updates of k microbatches.

    The number of updates between F and B depends on the position of a microbatch in its update. So that all positions are measured
    equally often, the distance has no common factor with k.
    """
    offset = next(r for r in range(max(1, round(GOLDEN * k)), 0, -1) if gcd(r, k) == 1)
    return k * updates + (offset if k > 1 else 0)


def _recent(measured: _Measured) -> float:
    return mean(float(drift) for drift in measured.recent) if measured.recent else 0.0


def _strided(tensor: Tensor) -> Tensor:
    """Return at most :data:`LARGEST_SAMPLE` entries of a tensor, at equal distances in memory."""
    count, size = tensor.numel(), min(tensor.numel(), LARGEST_SAMPLE)
    return tensor.as_strided((size,), (count // size,))
