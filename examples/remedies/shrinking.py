"""Gradient shrinking: δ is multiplied by β at every boundary where gradients get staler (Zhuang et al. 2021, compared with the
authors' code).

The gradient of stage j is therefore scaled by β^n, where n is the number of such boundaries between stage j and the loss. Methods
whose gradients are exact, such as 1F1B, have none.
"""

from __future__ import annotations

from dataclasses import dataclass

from petra import Extension
from petra.transport.port import WrappedPort


@dataclass(frozen=True)
class GradientShrinking(Extension):
    """Multiplies the gradients that stages send upstream by β."""

    factor: float = 0.9

    def wrap_port(self, upstream, plan, j):
        return _Shrinking(upstream, self.factor) if j > 0 and plan.stages[j - 1].staleness > plan.stages[j].staleness else upstream


class _Shrinking(WrappedPort):
    def __init__(self, inner, factor):
        super().__init__(inner)
        self._factor = factor

    def send(self, m, message):
        x, delta, report = message
        self.inner.send(m, (x, tuple(d * self._factor for d in delta), report))
