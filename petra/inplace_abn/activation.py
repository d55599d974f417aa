"""Invertible activations. Their input and their gradient are computed from their output."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from petra.errors import alternatives, require

aten = torch.ops.aten
ACTIVATIONS = ("leaky_relu", "elu", "sigmoid", "tanh", "identity")
FUSED = ("leaky_relu", "elu", "identity")
"""Activations that the CUDA kernels of :class:`petra.inplace_abn.InPlaceABN` support."""


@dataclass(frozen=True)
class Activation:
    """An elementwise, strictly increasing activation z = φ(y) of tensors of any shape.

    Attributes:
        name: ``leaky_relu``, ``elu``, ``sigmoid``, ``tanh`` or ``identity``.
        slope: Slope of ``leaky_relu`` for negative inputs.

    Raises:
        ConfigError: If the name is unknown, or the slope is not in (0, 1].
    """

    name: str
    slope: float = 0.01

    def __post_init__(self) -> None:
        require(self.name in ACTIVATIONS, "activation", f"{alternatives(ACTIVATIONS)}, which are invertible", self.name)
        require(0 < self.slope <= 1, "slope", "a number > 0 and <= 1", self.slope)

    def apply_(self, y: Tensor) -> Tensor:
        """Compute z in the memory of y and return it."""
        if self.name == "leaky_relu":
            return F.leaky_relu_(y, self.slope)
        if self.name == "elu":
            return F.elu_(y)
        if self.name == "sigmoid":
            return y.sigmoid_()
        return y.tanh_() if self.name == "tanh" else y

    def gradient(self, dz: Tensor, z: Tensor) -> Tensor:
        """Return dL/dy, given dL/dz and z."""
        dy = dz
        if self.name == "leaky_relu":
            dy = aten.leaky_relu_backward(dz, z, self.slope, True)
        elif self.name == "elu":
            dy = aten.elu_backward(dz, 1, 1, 1, True, z)
        elif self.name == "sigmoid":
            dy = aten.sigmoid_backward(dz, z)
        elif self.name == "tanh":
            dy = aten.tanh_backward(dz, z)
        return dy

    def inverse(self, z: Tensor) -> Tensor:
        """Return y, given z. The result is z itself if φ is the identity, and a new tensor otherwise."""
        if self.name == "leaky_relu":
            return F.leaky_relu(z, 1 / self.slope)
        if self.name == "elu":
            # For very negative y, z rounds to -1, whose inverse would be -inf.
            y = torch.log1p(z.clamp(min=-1 + torch.finfo(z.dtype).eps))
            return torch.where(z > 0, z, y)
        # Saturated outputs round to the ends of the range, whose inverse would be infinite.
        limit = 1 - torch.finfo(z.dtype).eps
        if self.name == "sigmoid":
            return torch.logit(z.clamp(1 - limit, limit))
        return torch.atanh(z.clamp(-limit, limit)) if self.name == "tanh" else z
