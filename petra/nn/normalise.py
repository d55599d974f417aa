"""Batch normalisation that can write over its input, and its gradient from whatever the normalised values follow from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.modules.batchnorm import _NormBase

from petra.errors import ModelError

aten = torch.ops.aten
Undo = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Statistics:
    """What the backward pass needs to know of a normalisation."""

    mean: Tensor
    invstd: Tensor
    """μ and 1/σ, (C,)."""
    joint: tuple[Tensor, dist.ProcessGroup] | None = None
    """Where a group shares statistics: the number of values for each channel in its joint batch, and the group."""
    running: bool = False
    """These are the running statistics, through which no gradient flows."""


def check_input(layer: _NormBase, x: Tensor, group: dist.ProcessGroup | None = None) -> None:
    """Raises :class:`petra.errors.ModelError` for an input that the layer can't normalise."""
    name, shape, channels = type(layer).__name__, list(x.shape), layer.num_features
    if x.dim() < 2 or x.shape[1] != channels or not x.is_floating_point():
        found = f"{str(x.dtype).removeprefix('torch.')}{shape}"
        raise ModelError(f"{name}: found an input {found}, accepted are floats [B, {channels}, ...]")
    processes = 1 if group is None else dist.get_world_size(group)
    if _uses_batch(layer) and processes * x.numel() <= channels:
        raise ModelError(
            f"{name}: found one value for each channel in {shape}, which has no variance; "
            "accepted in training are two or more: a larger batch, or larger images"
        )


def safe_affine(layer: _NormBase, x: Tensor) -> tuple[Tensor, Tensor]:
    """Copies of γ, no nearer to zero than ±eps, and of β."""
    if layer.weight is None:
        kind = torch.float32 if x.dtype in (torch.bfloat16, torch.float16) else x.dtype
        return x.new_ones(layer.num_features, dtype=kind), x.new_zeros(layer.num_features, dtype=kind)
    return away_from_zero(layer.weight, layer.eps), layer.bias.clone()


def away_from_zero(gamma: Tensor, eps: float) -> Tensor:
    return gamma.abs().clamp(min=eps).copysign(gamma)


def affine(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """scale · x + shift for values (C,) and x (B, C, ...), in new memory."""
    return torch.addcmul(_per_channel(shift, x), x, _per_channel(scale, x)).to(x.dtype)


def normalise(
    layer: _NormBase, x: Tensor, out: Tensor, scale: Tensor, shift: Tensor, group: dist.ProcessGroup | None = None
) -> Statistics:
    """out ← scale · x̂ + shift, with statistics of the batch in training, which also move the running ones, and running ones else.

    ``out`` may be x.
    """
    running, momentum = _moving_statistics(layer)
    if _uses_batch(layer) and group is None:
        mean, invstd = torch.empty_like(scale), torch.empty_like(scale)
        _batch_norm(x, out, scale, shift, *running, True, momentum, layer.eps, mean, invstd)
        return Statistics(mean, invstd)
    joint = None
    if _uses_batch(layer):
        assert group is not None
        mean, var, count = _joint_statistics(x, scale.dtype, group)
        for average, value in zip(running, (mean, var * (count / (count - 1))), strict=True):
            if average is not None:
                average.lerp_(value, momentum)
        joint = count, group
    else:
        mean, var = layer.get_buffer("running_mean"), layer.get_buffer("running_var")
    empty = scale.new_empty(0)
    _batch_norm(x, out, scale, shift, mean, var, False, 0.0, layer.eps, empty, empty)
    return Statistics(mean, (var + layer.eps).rsqrt(), joint, running=joint is None)


def normalise_backward(
    undo: Undo | None, dz: Tensor, z: Tensor, scale: Tensor, shift: Tensor, rate: Tensor, statistics: Statistics, needs_dx: bool
) -> tuple[Tensor | None, Tensor, Tensor]:
    """(dL/dx, Σ dy x̂, Σ dy) for x̂ = (y − shift) / scale; ``rate`` is dL/dx over dL/dy with the statistics held fixed: γ/σ.

    With y = x̂ these are the lines of Algorithm 1, with y = γ x̂ + β those of Algorithm 2: one kernel does both.

    Args:
        undo: from dL/dz and z to dL/dy and y; None: they are that already.
    """
    dy, y = (dz, z) if undo is None else undo(dz, z)
    whole = needs_dx and not statistics.running and statistics.joint is None
    # The kernel takes x̂ as (input − mean) · invstd, and the rate as weight · invstd.
    moments = rate * scale, None, None, shift, 1 / scale
    dx, dgamma, dbeta = aten.native_batch_norm_backward(dy, y, *moments, True, 0.0, [whole, True, True])
    if needs_dx and not whole:
        slope, offset = input_line(dgamma, dbeta, scale, shift, rate, statistics, z.numel() // len(rate))
        dx = affine(y, slope, offset).addcmul_(dy, _per_channel(rate, dy))
    return dx if needs_dx else None, dgamma, dbeta


def input_line(
    dgamma: Tensor, dbeta: Tensor, scale: Tensor, shift: Tensor, rate: Tensor, statistics: Statistics, count: int
) -> tuple[Tensor, Tensor]:
    """Slope and offset, (C,), of dL/dx = rate · dy + slope · y + offset, from the sums over the ``count`` values at hand."""
    if statistics.running:
        return torch.zeros_like(rate), torch.zeros_like(rate)
    sums, values = torch.stack([dgamma, dbeta]), torch.tensor(count)
    if statistics.joint is not None:
        values, group = statistics.joint
        dist.all_reduce(sums, group=group)
    mean_dgamma, mean_dbeta = sums / values
    # rate · (dy − mean(dy) − x̂ mean(dy x̂))
    slope = -rate * mean_dgamma / scale
    return slope, -rate * mean_dbeta - slope * shift


def _uses_batch(layer: _NormBase) -> bool:
    return layer.training or layer.running_mean is None


def _moving_statistics(layer: _NormBase) -> tuple[tuple[Tensor | None, Tensor | None], float]:
    """The running statistics that a forward moves, if any, and how far towards those of the batch; counts the batch."""
    if not (layer.training and layer.track_running_stats):
        return (None, None), 0.0
    batches = layer.get_buffer("num_batches_tracked").add_(1)
    return (layer.running_mean, layer.running_var), 1 / float(batches) if layer.momentum is None else layer.momentum


def _joint_statistics(x: Tensor, dtype: torch.dtype, group: dist.ProcessGroup) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, biased variance and number of values of the group's joint batch, whose parts may differ in size (Chan et al. 1979)."""
    var, mean = torch.var_mean(x.to(dtype), [0, *range(2, x.dim())], correction=0)
    own = torch.cat([mean, var, mean.new_tensor([x.numel() // x.shape[1]])])
    parts = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, own, group=group)
    means, variances, counts = torch.split(torch.stack(parts), [len(mean), len(mean), 1], dim=1)
    count = counts.sum()
    shares = counts / count
    mean = (shares * means).sum(0)
    return mean, (shares * (variances + (means - mean).square())).sum(0), count


def _batch_norm(x: Tensor, out: Tensor, *arguments: object) -> None:
    """:func:`torch.native_batch_norm` into ``out``, which may be its input: it writes elementwise once the statistics are known."""
    *rest, mean, invstd = arguments
    dense = x.is_contiguous() or (x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last))
    # The kernel that writes into given memory is right for dense tensors only.
    target = out if dense else torch.empty_like(x, memory_format=torch.contiguous_format)
    aten.native_batch_norm.out(x if dense else x.contiguous(), *rest, out=target, save_mean=mean, save_invstd=invstd)
    if not dense:
        out.copy_(target)


def _per_channel(values: Tensor, like: Tensor) -> Tensor:
    return values.view(-1, *[1] * (like.dim() - 2))
