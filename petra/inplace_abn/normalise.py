"""Batch normalisation that can overwrite its input, and its gradient computed from the output."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from petra.errors import ModelError, invalid
from petra.torch_private import NormBase

aten = torch.ops.aten


@dataclass(frozen=True)
class Statistics:
    """Statistics of a forward pass that its backward pass needs.

    Attributes:
        mean: μ of each channel, (C,).
        invstd: 1/σ of each channel, (C,).
        joint: If a process group shares statistics, the number of values per channel in its joint batch, and the group.
        running: Whether these are the running statistics, through which no gradient flows.
    """

    mean: Tensor
    invstd: Tensor
    joint: tuple[Tensor, dist.ProcessGroup] | None = None
    running: bool = False


def check_input(layer: NormBase, x: Tensor, group: dist.ProcessGroup | None, *, alone: bool) -> None:
    """Check that a layer can normalise an input.

    Args:
        alone: Whether the batch of a layer without ``group`` is the whole one. Otherwise its size is not checked.

    Raises:
        ModelError: If ``x`` is not a floating-point tensor (B, C, ...), or if its statistics would be those of a single value.
    """
    name, shape, channels = type(layer).__name__, list(x.shape), layer.num_features
    if x.dim() < 2 or x.shape[1] != channels or not x.is_floating_point():
        got = f"{str(x.dtype).removeprefix('torch.')}{shape}"
        raise invalid(name, f"a floating-point input [B, {channels}, ...]", got, ModelError)
    processes = 1 if group is None else dist.get_world_size(group)
    if (alone or group is not None) and layer.training and processes * x.numel() <= channels:
        expected = "at least 2 values per channel in training (a larger batch or larger images)"
        raise invalid(name, expected, f"1 in {shape}", ModelError)


def away_from_zero(gamma: Tensor, eps: float) -> Tensor:
    """Return γ with values below ``eps`` in magnitude replaced by ±``eps``."""
    return gamma.abs().clamp(min=eps).copysign(gamma)


def normalise(layer: NormBase, x: Tensor, out: Tensor, scale: Tensor, shift: Tensor, group: dist.ProcessGroup | None) -> Statistics:
    """Compute scale · x̂ + shift.

    In training this uses the statistics of the batch and updates the running statistics. In evaluation it uses the latter.

    Args:
        layer: Layer with the running statistics, eps and momentum.
        x: Input, (B, C, ...).
        out: Tensor of the shape of x that receives the result. May be x.
        scale, shift: (C,).
        group: Process group that shares batch statistics.
    """
    running = layer.get_buffer("running_mean"), layer.get_buffer("running_var")
    updates = layer.training and layer.track_running_stats  # not in a forward pass that the backward pass repeats
    if updates:
        layer.get_buffer("num_batches_tracked").add_(1)
    if layer.training and group is None:
        mean, invstd, momentum = torch.empty_like(scale), torch.empty_like(scale), layer.momentum if updates else 0.0
        _batch_norm(x, out, scale, shift, *(running if updates else (None, None)), True, momentum, layer.eps, mean, invstd)
        return Statistics(mean, invstd)
    joint = None
    if layer.training:
        assert group is not None
        mean, var, count = _joint_statistics(x, scale.dtype, group)
        if updates:
            for average, value in zip(running, (mean, var * (count / (count - 1))), strict=True):
                average.lerp_(value, layer.momentum)  # type: ignore[arg-type]
        joint = count, group
    else:
        mean, var = running
    empty = scale.new_empty(0)
    _batch_norm(x, out, scale, shift, mean, var, False, 0.0, layer.eps, empty, empty)
    return Statistics(mean, (var + layer.eps).rsqrt(), joint, running=joint is None)


def normalise_backward(
    dy: Tensor, y: Tensor, scale: Tensor, shift: Tensor, rate: Tensor, statistics: Statistics, needs_dx: bool
) -> tuple[Tensor | None, Tensor, Tensor]:
    """Return (dL/dx, Σ dy x̂, Σ dy) for x̂ = (y − shift) / scale: Algorithm 2 of Rota Bulò et al. 2018 in terms of y.

    Args:
        dy, y: dL/dy and y, (B, C, ...).
        scale, shift: (C,).
        rate: dL/dx divided by dL/dy for constant statistics, which is γ/σ, (C,).
        statistics: Statistics of the forward pass.
        needs_dx: Whether to compute dL/dx. The result has None in its place otherwise.
    """
    fused = needs_dx and not statistics.running and statistics.joint is None
    # The kernel computes x̂ as (input − mean) · invstd, and the rate as weight · invstd.
    moments = rate * scale, None, None, shift, 1 / scale
    dx, dgamma, dbeta = aten.native_batch_norm_backward(dy, y, *moments, True, 0.0, [fused, True, True])
    if needs_dx and not fused:
        slope, offset = input_gradient_coefficients(dgamma, dbeta, scale, shift, rate, statistics, y.numel() // len(rate))
        dx = torch.addcmul(_per_channel(offset, y), y, _per_channel(slope, y)).to(y.dtype).addcmul_(dy, _per_channel(rate, dy))
    return dx if needs_dx else None, dgamma, dbeta


def input_gradient_coefficients(
    dgamma: Tensor, dbeta: Tensor, scale: Tensor, shift: Tensor, rate: Tensor, statistics: Statistics, count: int
) -> tuple[Tensor, Tensor]:
    """Return slope and offset, each (C,), of dL/dx = rate · dy + slope · y + offset.

    Args:
        dgamma, dbeta: Σ dy x̂ and Σ dy over the values of this process, (C,).
        scale, shift, rate, statistics: As in :func:`normalise_backward`.
        count: Number of values per channel in this process.
    """
    if statistics.running:
        return torch.zeros_like(rate), torch.zeros_like(rate)
    sums, values = torch.stack([dgamma, dbeta]), torch.tensor(count)
    if statistics.joint is not None:
        values, group = statistics.joint
        dist.all_reduce(sums, group=group)
    mean_dgamma, mean_dbeta = sums / values
    # dL/dx = rate · (dy − mean(dy) − x̂ mean(dy x̂))
    slope = -rate * mean_dgamma / scale
    return slope, -rate * mean_dbeta - slope * shift


def _joint_statistics(x: Tensor, dtype: torch.dtype, group: dist.ProcessGroup) -> tuple[Tensor, Tensor, Tensor]:
    """Return mean, biased variance and number of values per channel of the group's joint batch.

    The parts of the processes may differ in size (Chan et al. 1979).
    """
    var, mean = torch.var_mean(x.to(dtype), [0, *range(2, x.dim())], correction=0)
    own = torch.cat([mean, var, mean.new_full((1,), x.numel() // x.shape[1])])
    parts = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, own, group=group)
    means, variances, counts = torch.split(torch.stack(parts), [len(mean), len(mean), 1], dim=1)
    count = counts.sum()
    shares = counts / count
    mean = (shares * means).sum(0)
    return mean, (shares * (variances + (means - mean).square())).sum(0), count


def _batch_norm(x: Tensor, out: Tensor, *arguments: object) -> None:
    """Run ``native_batch_norm`` with output ``out``, which may be ``x``: it writes elementwise after computing the statistics."""
    *rest, mean, invstd = arguments
    dense = x.is_contiguous() or (x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last))
    # The out= variant is correct for dense tensors only.
    target = out if dense else torch.empty_like(x, memory_format=torch.contiguous_format)
    aten.native_batch_norm.out(x if dense else x.contiguous(), *rest, out=target, save_mean=mean, save_invstd=invstd)
    if not dense:
        out.copy_(target)


def _per_channel(values: Tensor, like: Tensor) -> Tensor:
    """Return values (C,) in a shape that broadcasts with ``like`` (B, C, ...)."""
    return values.view(-1, *[1] * (like.dim() - 2))
