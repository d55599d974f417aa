"""Exponential moving average of a stage's weights, used for evaluation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor

from petra.torch_private import foreach_lerp_


class WeightAverage:
    """Moving average of parameters. Does nothing if ``decay`` is None.

    Args:
        parameters: The stage's trained parameters.
        decay: Weight of the old average in each update, or None for no average.

    Attributes:
        values: One average for each parameter; empty if ``decay`` is None.
    """

    def __init__(self, parameters: Sequence[Tensor], decay: float | None) -> None:
        self._parameters, self.decay = parameters, decay
        self.restart()

    def restart(self) -> None:
        """Set the averages to the current weights."""
        self.values = [p.detach().clone() for p in self._parameters] if self.decay is not None else []

    def update(self, updates: int) -> None:
        """Include the current weights, after ``updates`` earlier updates."""
        if not self.values:
            return
        assert self.decay is not None
        # A smaller decay at first, because short runs would otherwise average mostly initial weights.
        decay = min(self.decay, (1 + updates) / (10 + updates))
        foreach_lerp_(self.values, [p.detach() for p in self._parameters], 1 - decay)

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """Replace the parameters by their averages inside the ``with`` block. The pipeline must be drained."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def _swap(self) -> None:
        for i, average in enumerate(self.values):
            parameter = self._parameters[i]
            self.values[i], parameter.data = parameter.data, average
