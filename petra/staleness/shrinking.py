"""Gradient shrinking: the gradient δ is multiplied by β at every boundary between stages with a delay.

The gradient of stage j is therefore scaled by β^n, where n is the number of delayed boundaries between stage j and the loss.

Source: Zhuang et al. 2021, compared with the authors' code.
"""

from __future__ import annotations

from collections.abc import Sequence

from petra.specs import Message
from petra.transport import Port
from petra.transport.port import WrappedPort


class ShrinkingPort(WrappedPort):
    """Upstream port that multiplies gradients by a factor before they are sent."""

    def __init__(self, inner: Port, factor: float) -> None:
        super().__init__(inner)
        self._factor = factor

    def send(self, m: int, message: Message) -> None:
        x, delta, report = message
        self.inner.send(m, (x, tuple(d * self._factor for d in delta), report))


def boundary_factor(shrink: float, delays: Sequence[int], stage: int) -> float:
    """Return the factor of the gradient that a stage sends upstream.

    Args:
        shrink: β; 1 switches the remedy off.
        delays: Delay τ of each stage. A boundary is delayed if the stage before it has a larger τ than the stage after it.
        stage: Index of the stage, from 0.
    """
    return shrink if stage > 0 and delays[stage - 1] > delays[stage] else 1.0
