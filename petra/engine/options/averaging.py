"""Exponential moving average of a stage's weights, used for evaluation."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

from torch import Tensor

from petra.engine.update import Part, Pending, Tensors, Update
from petra.torch_private import foreach_lerp_


@contextmanager
def averaged(updates: Iterable[Update]) -> Iterator[None]:
    """Replace the parameters of stages by their moving averages, where there are any, inside the ``with`` block."""
    with ExitStack() as stack:
        for update in updates:
            if (average := update.part(WeightAverage)) is not None:
                stack.enter_context(average.swapped())
        yield


class WeightAverage(Part):
    """Moving average of parameters, updated after each step.

    Args:
        parameters: The stage's trained parameters.
        decay: Weight of the old average in each update.

    Attributes:
        values: One average for each parameter.
    """

    def __init__(self, parameters: Sequence[Tensor], decay: float) -> None:
        self._parameters, self.decay = parameters, decay
        self.restart()

    def restart(self) -> None:
        """Set the averages to the current weights."""
        self.values = [p.detach().clone() for p in self._parameters]

    def tensors(self) -> dict[str, dict[Tensor, Tensor]]:
        return {"average": dict(zip(self._parameters, self.values, strict=True))}

    def load(self, numbers: Mapping[str, float], tensors: Tensors) -> None:
        """Restore the averages. A run without averages has saved none; they begin with the weights."""
        saved = tensors.get("average", {})
        for p, average in zip(self._parameters, self.values, strict=True):
            if p in saved:
                average.copy_(saved[p])

    def __call__(self, pending: Pending) -> None:
        """Include the current weights."""
        if not self.values:
            return
        # A smaller decay at first, because short runs would otherwise average mostly initial weights.
        decay = min(self.decay, (1 + pending.done) / (10 + pending.done))
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
