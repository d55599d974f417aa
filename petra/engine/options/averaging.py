"""Exponential moving average of a stage's weights, used for evaluation."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from torch import Tensor

from petra.engine.update import Part, Pending, Update
from petra.errors import require
from petra.torch_private import foreach_lerp_


@contextmanager
def averaged(updates: Iterable[Update]) -> Iterator[None]:
    """Replace the parameters of stages by their moving averages inside the ``with`` block. The pipeline must be drained."""
    parts = [part for update in updates if (part := update.part(WeightAverage)) is not None]
    averages = [part for part in parts if not part.swapped]  # evaluate() inside averaged() enters it again
    for average in averages:
        average.swap()
    try:
        yield
    finally:
        for average in averages:
            average.swap()


class WeightAverage(Part):
    """Moving average of parameters, updated after each step.

    Args:
        parameters: The stage's trained parameters.
        decay: Weight of the old average in each update.

    Attributes:
        values: One average for each parameter.
        swapped: Whether the parameters are the averages at present.
    """

    def __init__(self, parameters: Sequence[Tensor], decay: float) -> None:
        self._parameters, self.decay, self.swapped = parameters, decay, False
        self.resume({})

    def tensors(self) -> dict[str, dict[Tensor, Tensor]]:
        require(not self.swapped, "averaged()", "to be left before a pipeline is trained or saved", "its weights")
        return {"average": dict(zip(self._parameters, self.values, strict=True))}

    def resume(self, tensors: Mapping[str, Mapping[Tensor, Tensor]]) -> None:
        self.values = [p.detach().clone() for p in self._parameters]
        for average, parameter in zip(self.values, self._parameters, strict=True):
            if parameter in (saved := tensors.get("average", {})):
                average.copy_(saved[parameter])

    def run(self, pending: Pending) -> None:
        """Include the current weights."""
        if not self.values:
            return
        # A smaller decay at first, because short runs would otherwise average mostly initial weights.
        decay = min(self.decay, (1 + pending.done) / (10 + pending.done))
        foreach_lerp_(self.values, [p.detach() for p in self._parameters], 1 - decay)

    def swap(self) -> None:
        """Exchange the parameters and their averages."""
        self.swapped = not self.swapped
        for i, (average, parameter) in enumerate(zip(self.values, self._parameters, strict=True)):
            self.values[i], parameter.data = parameter.data, average
