"""BatchNorm, activation and convolution that store one tensor and recompute the convolution's input in the backward pass.

These are the two checkpointing schemes that Rota Bulò et al. 2018 compare with InPlace-ABN (Fig. 2b and 2c).
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from petra.errors import require
from petra.inplace_abn.layer import InPlaceABN
from petra.inplace_abn.normalise import affine, away_from_zero, check_input, normalise, normalise_backward, safe_affine
from petra.torch_private import conv_forward

aten = torch.ops.aten


class CheckpointedABNConv(nn.Module):
    """Compute conv(φ(γ x̂ + β)), where x̂ is the normalised input. Maps (B, C, H, W) to the convolution's output.

    Args:
        norm: Layer whose activation φ, parameters γ and β and running statistics are used. Its ``forward`` is not called.
        conv: Convolution with zero padding.
        keep: Tensor that is stored for the backward pass. ``input`` stores x and recomputes x̂, y and z (Fig. 2b).
            ``normalised`` overwrites x with x̂, which the gradient of the normalisation needs, and recomputes y and z (Fig. 2c).

    Raises:
        ConfigError: If ``keep`` is unknown, or ``conv`` pads with anything but zeros or gives its padding as a string.
        ModelError: In ``forward``, for the inputs that :class:`InPlaceABN` rejects.
    """

    def __init__(self, norm: InPlaceABN, conv: nn.Conv2d, keep: Literal["input", "normalised"]) -> None:
        super().__init__()
        require(keep in ("input", "normalised"), "keep", "input or normalised", keep)
        zeros = conv.padding_mode == "zeros" and not isinstance(conv.padding, str)
        require(zeros, "conv", "zero padding with sizes as integers", f"padding {conv.padding} of mode {conv.padding_mode}")
        self.norm, self.conv, self.keep = norm, conv, keep

    def forward(self, x: Tensor) -> Tensor:
        """Return the convolution's output. Overwrites ``x`` if ``keep`` is ``normalised``."""
        check_input(self.norm, x, self.norm.group)
        norm, conv = self.norm, self.conv
        y: Tensor = _CheckpointedABNConv.apply(self, x, norm.weight, norm.bias, conv.weight, conv.bias)  # type: ignore[no-untyped-call]
        return y


class _CheckpointedABNConv(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        layer: CheckpointedABNConv,
        x: Tensor,
        gamma: Tensor | None,
        beta: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
    ) -> Tensor:
        norm, conv = layer.norm, layer.conv
        scale, shift = safe_affine(norm, x)
        if layer.keep == "normalised":
            ctx.statistics = normalise(norm, x, x, torch.ones_like(scale), torch.zeros_like(shift), norm.group)
            z = affine(x, scale, shift)
        else:
            z = torch.empty_like(x)
            ctx.statistics = normalise(norm, x, z, scale, shift, norm.group)
        norm.activation.apply_(z)
        out = conv_forward(conv, z, weight, bias)
        ctx.layer, ctx.compute = layer, out.dtype
        ctx.save_for_backward(x, scale, shift, gamma, weight)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        layer: CheckpointedABNConv = ctx.layer
        norm, conv = layer.norm, layer.conv
        x, scale, shift, gamma, weight = ctx.saved_tensors
        mean, invstd = ctx.statistics.mean, ctx.statistics.invstd
        if layer.keep == "normalised":
            y_scale, y_shift, x_scale, x_shift = scale, shift, torch.ones_like(scale), torch.zeros_like(shift)
        else:
            y_scale, y_shift, x_scale, x_shift = scale * invstd, shift - scale * invstd * mean, 1 / invstd, mean
        z = norm.activation.apply_(affine(x, y_scale, y_shift))
        dz, dweight, dbias = aten.convolution_backward(
            dout,
            z.to(ctx.compute),
            weight.to(ctx.compute),
            None if conv.bias is None else [conv.out_channels],
            conv.stride,
            conv.padding,
            conv.dilation,
            False,
            [0, 0],
            conv.groups,
            [True, True, conv.bias is not None],
        )
        dy = norm.activation.gradient(dz.to(z.dtype), z)
        del z, dz
        rate = invstd if gamma is None else away_from_zero(gamma, norm.eps) * invstd
        dx, dgamma, dbeta = normalise_backward(None, dy, x, x_scale, x_shift, rate, ctx.statistics, ctx.needs_input_grad[1])
        affine_gradients = (None, None) if gamma is None else (dgamma, dbeta)
        return None, dx, *affine_gradients, dweight.to(weight.dtype), None if dbias is None else dbias.to(weight.dtype)
