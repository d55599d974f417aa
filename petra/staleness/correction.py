"""Discrepancy correction, PipeMare's technique T2: the backward pass estimates the weights that the forward pass used.

The backward pass of a stage with staleness s differentiates, and reconstructs with, the weights

    w − s·d,    d ← γ·d + (1 − γ)·(change of w in the last update),    γ = D^(1/s)

where d is a moving average of the change of w per update and D is the setting.

Source: Yang et al. 2021, PipeMare, with D = 0.135 ≈ e⁻². The formula is written from memory; the paper's text was not available to
compare it. Technique T3, a synchronous warm-up, is not implemented.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from petra.torch_private import foreach_add, foreach_lerp_


class Correction:
    """Weights for the backward pass of one stage.

    Args:
        parameters: The stage's trained parameters.
        decay: D.
        staleness: s > 0, in updates.

    Attributes:
        drift: d for each parameter; empty before the first update.
    """

    def __init__(self, parameters: list[Tensor], decay: float, staleness: float) -> None:
        self._parameters, self._decay, self._staleness = parameters, decay, staleness
        self.drift: list[Tensor] = []

    def update(self, change: Sequence[Tensor]) -> None:
        """Include the change of each parameter in the last update."""
        if not self.drift:
            self.drift = [torch.zeros_like(p) for p in self._parameters]
        foreach_lerp_(self.drift, list(change), 1 - self._decay ** (1 / self._staleness))

    def weights(self) -> Sequence[Tensor] | None:
        """Return the weights for the backward pass, or None before the first update."""
        return foreach_add(self._parameters, self.drift, alpha=-self._staleness) if self.drift else None
