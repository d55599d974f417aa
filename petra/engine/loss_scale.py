"""Loss scaling inside a stage: keeps small fp16 gradients from underflowing.

A stage multiplies the gradient δ that it receives by its scale and divides the gradient that it sends by the same scale. Gradients
between stages are therefore unscaled, and every stage adapts its scale without communication.
Source: Micikevicius et al. 2018, section 3.2.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from petra.specs import Streams

INITIAL_SCALE = 2.0**16
"""First value of a dynamic loss scale."""
GROWTH_INTERVAL = 2000
"""Number of successive updates without an overflow after which a dynamic scale doubles."""


def scalar(value: float, device: torch.device) -> Tensor:
    """Return a float64 tensor with no dimensions."""
    return torch.full((), float(value), dtype=torch.float64, device=device)  # torch.tensor would wait for a GPU


class LossScale:
    """Loss scale of one stage.

    Args:
        setting: A fixed scale, ``dynamic``, or None for no scale.
        device: Device of the stage's tensors.

    Attributes:
        scale: The scale of the current accumulation, or None. A tensor, so that adapting it does not wait for a GPU.
        good: Number of successive updates without a non-finite value.
    """

    def __init__(self, setting: float | Literal["dynamic"] | None, device: torch.device) -> None:
        self.dynamic = setting == "dynamic"
        scale = INITIAL_SCALE if setting == "dynamic" else setting
        self.scale = None if scale is None else scalar(scale, device)
        self.good = scalar(0, device)

    def multiply(self, delta: Streams) -> Streams:
        """Return ``delta`` times the scale, which must not be None."""
        assert self.scale is not None
        return tuple(d * self.scale.to(d.dtype) for d in delta)

    def divide(self, delta: Streams) -> Streams:
        """Return ``delta`` divided by the scale, which must not be None."""
        assert self.scale is not None
        return tuple(d / self.scale.to(d.dtype) for d in delta)

    def adapt(self, overflow: Tensor, bad: Tensor) -> None:
        """Adapt a dynamic scale after an update.

        Args:
            overflow: Whether this stage's own arithmetic overflowed. Halves the scale, down to 1 at least.
            bad: Whether the update is skipped, which restarts the growth interval.
        """
        assert self.scale is not None
        self.good = torch.where(bad, torch.zeros_like(self.good), self.good + 1)
        grown = torch.where((self.good % GROWTH_INTERVAL == 0) & ~bad, 2 * self.scale, self.scale)
        self.scale = torch.where(overflow, (self.scale / 2).clamp(min=1.0), grown)

    def load(self, good: float, scale: float | None) -> None:
        """Restore saved values. ``scale`` is ignored if either run uses no scale."""
        self.good = scalar(good, self.good.device)
        if self.scale is not None and scale is not None:
            self.scale = scalar(scale, self.good.device)
