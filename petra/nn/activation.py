"""Activations that can be undone: their input, and their gradient, follow from their output."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from petra.errors import ConfigError

aten = torch.ops.aten
ACTIVATIONS = ("leaky_relu", "elu", "identity")


@dataclass(frozen=True)
class Activation:
    """z = φ(y), elementwise and strictly increasing; ``slope`` is leaky_relu's below zero.

    Raises:
        ConfigError: an unknown name, or a slope that can't be undone.
    """

    name: str
    slope: float = 0.01

    def __post_init__(self) -> None:
        if self.name not in ACTIVATIONS:
            raise ConfigError(f"activation: found {self.name!r}, accepted are {', '.join(ACTIVATIONS)}, which can be undone")
        if not 0 < self.slope <= 1:
            raise ConfigError(f"slope: found {self.slope}, accepted are numbers above 0 and up to 1")

    def apply_(self, y: Tensor) -> Tensor:
        """z, in the memory of y."""
        if self.name == "leaky_relu":
            return F.leaky_relu_(y, self.slope)
        return F.elu_(y) if self.name == "elu" else y

    def gradient(self, dz: Tensor, z: Tensor) -> Tensor:
        """dL/dy from dL/dz."""
        dy = dz
        if self.name == "leaky_relu":
            dy = aten.leaky_relu_backward(dz, z, self.slope, True)
        elif self.name == "elu":
            dy = aten.elu_backward(dz, 1, 1, 1, True, z)
        return dy

    def inverse(self, z: Tensor) -> Tensor:
        """y, in memory of its own unless φ is the identity."""
        if self.name == "leaky_relu":
            return F.leaky_relu(z, 1 / self.slope)
        if self.name == "elu":
            # Far below zero z rounds to -1, which no finite y has.
            y = torch.log1p(z.clamp(min=-1 + torch.finfo(z.dtype).eps))
            return torch.where(z > 0, z, y)
        return z
