"""In-place activated batch normalisation (Rota Bulò, Porzi, Kontschieder 2018): one buffer where BatchNorm + activation keep two.

The result z overwrites the input x; between forward and backward only z and a few numbers for each channel are held. The backward
pass undoes the activation, y = φ⁻¹(z), and the affine map, x̂ = (y − β) / γ, and needs no more than that (section 3).
"""

from __future__ import annotations

import importlib.util
from types import ModuleType
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _NormBase

from petra.errors import ConfigError
from petra.nn.activation import Activation
from petra.nn.normalise import affine, away_from_zero, check_input, normalise, normalise_backward, safe_affine


class InPlaceABN(_NormBase):
    """Replaces BatchNorm + activation: z = φ(γ x̂ + β), written over the input (B, C, ...).

    Nobody else may need the input: put it behind a convolution, whose backward does not look at its own output. Parameters, buffers
    and state are BatchNorm's, and so are the numbers as long as |γ| >= ``eps``. A γ nearer to zero counts as ±``eps``, since the
    affine map could not be undone, and still gets its gradient. Gradients of gradients are not supported.

    Args:
        channels: C.
        activation: ``leaky_relu``, ``elu`` or ``identity``.
        slope: of leaky_relu below zero.
        variant: what gradients are written in: ``I``, x̂ (Algorithm 1); ``II``, y, which saves a pass over the data (Algorithm 2).
        overwrite: write over the input. False where others need it; it is not held for the backward pass either way.
        group: processes that normalise by the statistics of their joint batch. Each gets the gradients of its own part, so those of
            the parameters are to be summed over the group. None: every process for itself.
        eps, momentum, affine, track_running_stats: as in :class:`torch.nn.BatchNorm2d`.

    Raises:
        ConfigError: an argument out of range.
        ModelError: in ``forward``, an input of another form, or in training one with a single value for each channel.
    """

    def __init__(
        self,
        channels: int,
        activation: str = "leaky_relu",
        *,
        slope: float = 0.01,
        variant: Literal["I", "II"] = "II",
        overwrite: bool = True,
        group: dist.ProcessGroup | None = None,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
    ) -> None:
        super().__init__(channels, eps, momentum, affine, track_running_stats)
        if variant not in ("I", "II"):
            raise ConfigError(f"variant: found {variant!r}, accepted are I and II")
        self.activation = Activation(activation, slope)
        self.variant, self.overwrite, self.group = variant, overwrite, group

    def forward(self, x: Tensor) -> Tensor:
        check_input(self, x, self.group)
        z: Tensor = _InPlaceABN.apply(self, x, self.weight, self.bias)  # type: ignore[no-untyped-call]
        return z

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, activation={self.activation.name}, variant={self.variant}"  # type: ignore[no-untyped-call]


class _InPlaceABN(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, layer: InPlaceABN, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        # Copies, with which y can be undone even if an optimizer moves the parameters before the backward pass.
        scale, shift = safe_affine(layer, x)
        z = x if layer.overwrite else torch.empty_like(x)
        ctx.layer, ctx.statistics = layer, normalise(layer, x, z, scale, shift, layer.group)
        layer.activation.apply_(z)
        if layer.overwrite:
            ctx.mark_dirty(x)
        ctx.save_for_backward(z, scale, shift, weight)
        return z

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dz: Tensor) -> tuple[Tensor | None, ...]:
        layer: InPlaceABN = ctx.layer
        z, scale, shift, weight = ctx.saved_tensors
        statistics, needs_dx = ctx.statistics, ctx.needs_input_grad[1]
        rate = statistics.invstd if weight is None else away_from_zero(weight, layer.eps) * statistics.invstd

        def undo(dz: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
            return layer.activation.gradient(dz, z), layer.activation.inverse(z)

        def undo_both(dz: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
            dy, y = undo(dz, z)
            return dy, affine(y, 1 / scale, -shift / scale)

        kernels = _kernels(z) if layer.variant == "II" else None
        if kernels is not None:
            dx, dgamma, dbeta = kernels.backward(dz, z, scale, shift, rate, statistics, layer.activation, needs_dx)
        elif layer.variant == "II":
            dx, dgamma, dbeta = normalise_backward(undo, dz, z, scale, shift, rate, statistics, needs_dx)
        else:
            one, zero = torch.ones_like(scale), torch.zeros_like(shift)
            dx, dgamma, dbeta = normalise_backward(undo_both, dz, z, one, zero, rate, statistics, needs_dx)
        return None, dx, *((None, None) if weight is None else (dgamma, dbeta))


def _kernels(z: Tensor) -> ModuleType | None:
    """The fused kernels, where they can run: dense tensors on CUDA, with Triton installed."""
    if not z.is_cuda or importlib.util.find_spec("triton") is None:
        return None
    kernels = importlib.import_module("petra.nn.kernels")
    return kernels if kernels.takes(z) else None
