"""Layers of a pre-trained model as reversible blocks that compute nearly what the layers compute."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from petra.errors import ModelError, check_types, invalid, require
from petra.reversible import Coupling, Gradients, ReversibleBlock
from petra.specs import Streams, as_streams

STEP, BITS = 2.0**-15, 24
"""Every f is a multiple of the step. Couplings add this many bits at most; then float64 has all numbers up to 16,384 exactly."""


@dataclass(frozen=True)
class Momentum:
    """The first layers x + f(x) of a model with momentum: v ← γ v + (1 - γ) f(x), x ← x + v (Sander et al. 2021).

    The streams are the last two x, in float64. Sums are exact, because f is rounded and γ is a power of two; so the inverse is
    exact, whatever the type in which layers compute. The block after the last coupling gets x + γ / (1 - γ) v, in which every f
    has weight 1. With γ = 0, it would be the pre-trained network.

    Attributes:
        layers: Number of layers.
        gamma: γ. Every layer takes -log2 γ bits.

    Raises:
        ConfigError: If γ is not 1/2, 1/4, …, or the layers need more than 24 bits.
    """

    layers: int = 12
    gamma: float = 0.25

    def __post_init__(self) -> None:
        check_types(self, "coupling.")
        power = math.frexp(self.gamma)[0] == 0.5 and self.gamma < 1
        require(power, "coupling.gamma", "a power of two below 1, such as 0.25", self.gamma)
        most = int(BITS / -math.log2(self.gamma))
        require(1 <= self.layers <= most, "coupling.layers", f"1 to {most} with gamma={self.gamma:g}", self.layers)


def coupled(blocks: Mapping[str, nn.Module], coupling: Momentum) -> dict[str, nn.Module]:
    """Return the blocks of a model, the first layers of which are couplings."""
    require(isinstance(coupling, Momentum), "coupling", "None or a Momentum", coupling)
    names, last, gamma = list(blocks), coupling.layers, coupling.gamma
    require(last <= len(names) - 2, "coupling.layers", f"at most {len(names) - 2}, those of the model", last)
    layers = {name: _Coupled(blocks[name], gamma, first=name == names[1]) for name in names[1 : last + 1]}
    ends = {names[0]: _Enter(blocks[names[0]], gamma), names[last + 1]: _Leave(blocks[names[last + 1]], gamma)}
    return {**blocks, **layers, **ends}


class _Coupled(Coupling):
    """(x1, x2) → (x2, x2 + γ (x2 - x1) + (1 - γ) f(x2)), a :class:`Coupling` of -γ x1 and x2. ``first`` expects x1 = x2."""

    enable_exact_streams = ReversibleBlock.enable_exact_streams  # refuses

    def __init__(self, block: nn.Module, gamma: float, *, first: bool) -> None:
        super().__init__(block)
        self.gamma, self.first = gamma, first

    def forward(self, x1: Tensor, x2: Tensor, *context: Tensor, seed: int | None = None) -> Streams:
        return super().forward(-self.gamma * x1, x2, *context, seed=seed)

    def inverse(self, y1: Tensor, y2: Tensor, *context: Tensor, seed: int | None = None) -> Streams:
        return self._checked(*super().inverse(y1, y2, *context, seed=seed))

    def inverse_vjp(self, y: Streams, dy: Streams, *, seed: int | None = None) -> tuple[Streams, Streams, Gradients]:
        x, (dx1, *dx), gradients = super().inverse_vjp(y, dy, seed=seed)
        return self._checked(*x), (-self.gamma * dx1, *dx), gradients

    def _evaluate(self, x: Tensor, context: Sequence[Tensor], seed: int | None) -> Tensor:
        """Return (1 + γ) x + (1 - γ) f(x)."""
        hidden = x.to(next(self.f.parameters()).dtype)
        f = as_streams(super()._evaluate(hidden, context, seed))[0] - hidden
        return (1 + self.gamma) * x + _rounded((1 - self.gamma) * f.double())

    def _checked(self, scaled: Tensor, x2: Tensor, *context: Tensor) -> Streams:
        x1 = scaled / -self.gamma
        if self.first and not torch.equal(x1, x2) and bool(x2.isfinite().all()):
            expected = "backward passes with the weights of the forward (method=reversible), and activations below 16,384"
            raise invalid("coupling", expected, "an input that can't be reconstructed", ModelError)
        return x1, x2, *context


class _Around(nn.Module):
    def __init__(self, block: nn.Module, gamma: float) -> None:
        super().__init__()
        self.block, self.gamma = block, gamma


class _Enter(_Around):
    """A block whose output x becomes the streams (x, x)."""

    def forward(self, *inputs: Tensor) -> Streams:
        x, *context = as_streams(self.block(*inputs))
        return _rounded(x.double()), _rounded(x.double()), *context


class _Leave(_Around):
    """A block after the last coupling."""

    def forward(self, x1: Tensor, x2: Tensor, *context: Tensor) -> Any:
        return self.block((x2 + self.gamma / (1 - self.gamma) * (x2 - x1)).to(next(self.block.parameters()).dtype), *context)


def _rounded(x: Tensor) -> Tensor:
    """Round to multiples of :data:`STEP`. The gradient is that of the identity."""
    return x + ((x.detach() / STEP).round() * STEP - x.detach())
