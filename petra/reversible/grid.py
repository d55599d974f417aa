"""Exact streams: values rounded to a grid of equal steps, on which additions and subtractions are exact.

Floating-point sums round, so (x1 + F) − F is only close to x1, and the error grows with every block that is inverted. RevNet (Gomez
et al. 2017, section 3.2) suggests fixed-point numbers, with which Maclaurin et al. (2015) run entire trainings backwards. This
module stores fixed-point numbers in floating-point tensors: multiples of a power of two that fit into the significand. The rest of
the network does not change.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from petra.errors import ModelError, invalid, require

STEPS = {torch.float32: 2.0**-16, torch.float64: 2.0**-40}
"""Step of the grid for each stream type, a compromise between resolution and range."""


class Grid:
    """Grid of equal steps. It rounds tensors and records the largest magnitude of all streams.

    Attributes:
        limit: Largest magnitude up to which all multiples of the step can be represented: 256 in float32, 8192 in float64.
        largest: Largest magnitude recorded so far, a tensor on the device.

    Raises:
        ModelError: If ``dtype`` is not float32 or float64.
    """

    def __init__(self, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> None:
        require(dtype in STEPS, "exact_streams", "streams of torch.float32 or torch.float64", dtype, ModelError)
        self.dtype, self.limit = dtype, 2 * STEPS[dtype] / torch.finfo(dtype).eps
        self.largest = torch.zeros((), dtype=dtype, device=device)

    def round(self, x: Tensor) -> Tensor:
        """Round each entry to the nearest number on the grid, in its type and the shape of ``x``. Its gradient is 1."""
        return cast(Tensor, _Round.apply(x.to(self.dtype), STEPS[self.dtype]))  # type: ignore[no-untyped-call]

    def record(self, x: Tensor) -> None:
        """Include a stream of any shape in :attr:`largest`, without synchronizing with the device."""
        low, high = torch.aminmax(x.detach())
        largest = torch.maximum(-low, high)
        # The update reports values that are not finite. A NaN would stay in `largest` for good and hide later magnitudes.
        self.largest = torch.maximum(self.largest, largest.where(largest.isfinite(), 0))

    def enter(self, x: Tensor) -> Tensor:
        """Turn a tensor of any shape into a stream: round it and record its magnitude."""
        y = self.round(x)
        self.record(y)
        return y

    def require(self) -> None:
        """Check that all recorded streams were in the range in which sums are exact. Synchronizes with the device.

        Raises:
            ModelError: If a stream left that range.
        """
        if (largest := self.largest.item()) > self.limit:
            expected = f"streams of magnitude at most {self.limit:g} in {self.dtype}"
            raise invalid("exact_streams", expected, f"{largest:.6g}; reconstruction was not exact", ModelError)


class _Round(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, step: float) -> Tensor:
        return torch.mul(x, 1 / step).round_().mul_(step)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return dy, None
