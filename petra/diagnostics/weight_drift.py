"""Measures how far a stage's weights move between the forward and the backward pass of a microbatch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from math import gcd, nan

import torch
from torch import Tensor

from petra.errors import require
from petra.hooks import Hook
from petra.pipeline import Pipeline
from petra.specs import Streams

LARGEST_SAMPLE = 2**16
"""Largest number of entries of a parameter that are compared."""
GOLDEN = 0.618
"""Golden ratio, whose first multiples are already spread evenly modulo 1."""


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
        self._samples: dict[tuple[int, int], list[Tensor]] = {}  # of weights at a forward, by stage and microbatch
        self._drifts = defaultdict[int, list[Tensor]](list)  # since the last report
        self._last: dict[int, float] = {}

    def forward_end(self, stage: int, m: int, y: Streams) -> None:
        if (m + 1) % self.every == 0 and self.pipeline.plan.stages[stage].staleness > 0:
            self._samples[stage, m] = [entries.clone() for entries in self._entries(stage)]

    def backward_begin(self, stage: int, m: int, y: Streams, dy: Streams) -> None:
        if not (before := self._samples.pop((stage, m), None)):
            return
        moved, size = norm([a - b for a, b in zip(self._entries(stage), before, strict=True)]), norm(before)
        self._drifts[stage].append(torch.where(size > 0, moved / size, torch.zeros_like(size)))

    def metrics(self) -> dict[str, float]:
        """Return, for each stage j from 1 of this process, ``stage/<j>/staleness`` and ``stage/<j>/weight_drift``.

        ``staleness`` is the mean number of updates between forward and backward passes. ``weight_drift`` is the mean since the
        last call with a measurement; before the first, it is nan. Checkpoints don't contain measurements, so the mean of an
        epoch that a run resumes covers its rest.
        """
        rows: dict[str, float] = {}
        for j in self.pipeline.stages:
            if drifts := self._drifts.pop(j, []):
                self._last[j] = sum(map(float, drifts)) / len(drifts)
            rows[f"stage/{j + 1}/staleness"] = staleness = self.pipeline.plan.stages[j].staleness
            rows[f"stage/{j + 1}/weight_drift"] = self._last.get(j, nan if staleness else 0.0)
        return rows

    def _entries(self, j: int) -> list[Tensor]:
        """Return a view of at most :data:`LARGEST_SAMPLE` entries of each trained parameter of a stage, at equal distances."""
        parameters = [p.detach() for p in self.pipeline.stages[j].gradients.parameters if p.numel()]
        sizes = [min(p.numel(), LARGEST_SAMPLE) for p in parameters]
        return [p.as_strided((size,), (p.numel() // size,)) for p, size in zip(parameters, sizes, strict=True)]


def norm(tensors: Sequence[Tensor]) -> Tensor:
    """Return the norm of the values of all tensors, in float64."""
    return torch.stack([t.double().square().sum() for t in tensors]).sum().sqrt()


def distance(k: int, updates: int) -> int:
    """Return a number of microbatches between measurements: about ``updates`` updates of k microbatches.

    The number of updates between F and B depends on the position of a microbatch in its update. So that all positions are measured
    equally often, the distance has no common factor with k.
    """
    offset = next(r for r in range(max(1, round(GOLDEN * k)), 0, -1) if gcd(r, k) == 1)
    return k * updates + (offset if k > 1 else 0)
