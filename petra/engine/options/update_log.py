"""Numbers of the last updates, which decide about failures and statistics. On a GPU, the host reads many updates at once."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Outcome(NamedTuple):
    """Numbers of one update.

    Attributes:
        t: Number of microbatches that the stage has processed.
        squared_norm: Squared norm of the gradient that clipping uses: the stage's or the whole network's.
        own: Squared norm of the stage's own gradient.
        received: Sum of the gradients received since the last update.
        sent: Sum of the gradients sent since the last update, before the division by the loss scale; 0 without one.
        scale: Loss scale of the accumulation; 1 without one.
    """

    t: int
    squared_norm: float
    own: float
    received: float
    sent: float = 0.0
    scale: float = 1.0


class UpdateLog:
    """Outcomes that the host has not read yet.

    Args:
        capacity: Largest number of outcomes.
        values: Numbers per outcome, besides ``t``: the first of :class:`Outcome`.
        device: Device of the numbers.
    """

    def __init__(self, capacity: int, values: int, device: torch.device) -> None:
        self._rows = torch.zeros((capacity, values), dtype=torch.float64, device=device)
        self._clocks: list[int] = []

    @property
    def full(self) -> bool:
        """Whether :meth:`read` must be called before another outcome is added."""
        return len(self._clocks) == len(self._rows)

    def add(self, t: int, *values: Tensor) -> None:
        """Add the outcome of an update, given its float64 scalars on the device."""
        torch.stack(values, out=self._rows[len(self._clocks)])
        self._clocks.append(t)

    def read(self) -> list[Outcome]:
        """Remove all outcomes and return them, oldest first. Waits for the device unless there are none."""
        clocks, self._clocks = self._clocks, []
        rows = self._rows[: len(clocks)].tolist() if clocks else []
        return [Outcome(t, *row) for t, row in zip(clocks, rows, strict=True)]
