"""Backward pass of in-place activated batch normalisation as two Triton kernels for CUDA.

The reference is :func:`petra.inplace_abn.normalise.normalise_backward`, whose operations read and write ten tensors of the size of
z. The kernels read four (z and dL/dz, twice) and write one.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from petra.inplace_abn.normalise import Statistics, input_gradient_coefficients

PROGRAMS = 512
"""Number of programs that compute the sums. Channels are split among programs so that few channels also occupy a large GPU."""
LARGEST_GRID = 2**31 - 1, 2**16 - 1
"""CUDA's limits on the two axes of a grid of programs."""


def backward(
    dz: Tensor, z: Tensor, slope: float, scale: Tensor, shift: Tensor, rate: Tensor, statistics: Statistics, needs_dx: bool
) -> tuple[Tensor | None, Tensor, Tensor]:
    """Return (dL/dx, Σ dy x̂, Σ dy) for z = φ(y) and x̂ = (y − shift) / scale.

    Args:
        dz: dL/dz, of the shape of z.
        z: Dense output of the layer, (B, C, ...).
        slope: Slope of φ, a leaky ReLU.
        scale, shift, rate, statistics: As in :func:`petra.inplace_abn.normalise.normalise_backward`.
        needs_dx: Whether to compute dL/dx. The result has None in its place otherwise.
    """
    dz = torch.empty_like(z).copy_(dz) if dz.stride() != z.stride() else dz
    layout, tile = _layout(z)
    channels, rows, *_ = layout
    blocks = triton.cdiv(channels, tile["BLOCK_C"])
    parts = max(1, min(PROGRAMS // blocks, triton.cdiv(rows, tile["BLOCK_R"])))
    kind = torch.float64 if z.dtype == torch.float64 else torch.float32
    constants = {"SLOPE": slope, "DTYPE": tl.float64 if z.dtype == torch.float64 else tl.float32, **tile}
    partial = shift.new_empty((2, parts, channels), dtype=kind)
    _sums_kernel[(blocks, parts)](dz, z, shift, partial, *layout, parts, **constants)
    # A second sum instead of atomic additions: the order is fixed, so results are reproducible bit for bit.
    dgamma, dbeta = partial.sum(1).to(scale.dtype)
    dgamma = dgamma / scale
    if not needs_dx:
        return None, dgamma, dbeta
    coefficients = input_gradient_coefficients(dgamma, dbeta, scale, shift, rate, statistics, rows)
    dx = torch.empty_like(z)
    _input_gradient_kernel[input_gradient_grid(z)](dz, z, rate, *coefficients, dx, *layout, **constants)
    return dx, dgamma, dbeta


def trial(device: torch.device) -> None:
    """Compile and launch both kernels on a tensor of one element.

    Raises:
        Exception: Whatever Triton raises if it can't compile or launch them.
    """
    z, one = torch.ones((1, 1), device=device), torch.ones(1, device=device)
    backward(z, z, 1.0, one, one, one, Statistics(one, one), needs_dx=True)


def supports(z: Tensor) -> bool:
    """Return whether z is contiguous or channels-last, and not too large for a grid of programs."""
    dense = z.is_contiguous() or _channels_last(z)
    return dense and all(size <= most for size, most in zip(input_gradient_grid(z), LARGEST_GRID, strict=True))


def input_gradient_grid(z: Tensor) -> tuple[int, int]:
    """Return the number of blocks of rows and of channels. Rows, which can be many, are on the axis with the larger limit."""
    (channels, rows, *_), tile = _layout(z)
    return triton.cdiv(rows, tile["BLOCK_R"]), triton.cdiv(channels, tile["BLOCK_C"])


def _channels_last(z: Tensor) -> bool:
    return z.dim() == 4 and z.is_contiguous(memory_format=torch.channels_last)


def _layout(z: Tensor) -> tuple[tuple[int, int, int, int, int, int], dict[str, int]]:
    """Return the sizes and strides that the kernels take, and the tile of one program.

    Sizes and strides are: channels, rows (values per channel), positions (values per channel and image), and the strides of image,
    channel and position.
    """
    batch, channels = z.shape[:2]
    positions = z[0, 0].numel()
    rows, image = batch * positions, channels * positions
    if _channels_last(z) and not z.is_contiguous():
        return (channels, rows, positions, image, 1, channels), {"BLOCK_C": 32, "BLOCK_R": 32}
    return (channels, rows, positions, image, positions, 1), {"BLOCK_C": 1, "BLOCK_R": 1024}


@triton.jit
def _offsets(c, r, positions, image_stride, channel_stride, position_stride):
    image = (r // positions).to(tl.int64)
    return (image * image_stride + (r % positions) * position_stride)[None, :] + (c * channel_stride)[:, None]


@triton.jit
def _invert_activation(dz, z, SLOPE: tl.constexpr):
    """Return (dL/dy, y)."""
    return tl.where(z > 0, dz, dz * SLOPE), tl.where(z > 0, z, z / SLOPE)


@triton.jit
def _sums_kernel(
    dz_pointer,
    z_pointer,
    shift_pointer,
    out_pointer,
    channels,
    rows,
    positions,
    image_stride,
    channel_stride,
    position_stride,
    parts,
    SLOPE: tl.constexpr,
    DTYPE: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    part = tl.program_id(1)
    c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    shift = tl.load(shift_pointer + c, mask=c < channels, other=0).to(DTYPE)
    dgamma = tl.zeros((BLOCK_C, BLOCK_R), DTYPE)
    dbeta = tl.zeros((BLOCK_C, BLOCK_R), DTYPE)
    for start in range(part * BLOCK_R, rows, parts * BLOCK_R):
        r = start + tl.arange(0, BLOCK_R)
        mask = (c < channels)[:, None] & (r < rows)[None, :]
        offsets = _offsets(c, r, positions, image_stride, channel_stride, position_stride)
        dz = tl.load(dz_pointer + offsets, mask=mask, other=0).to(DTYPE)
        z = tl.load(z_pointer + offsets, mask=mask, other=0).to(DTYPE)
        dy, y = _invert_activation(dz, z, SLOPE)
        dgamma += dy * (y - shift[:, None])
        dbeta += dy
    out = out_pointer + part * channels + c
    tl.store(out, tl.sum(dgamma, 1), mask=c < channels)
    tl.store(out + parts * channels, tl.sum(dbeta, 1), mask=c < channels)


@triton.jit
def _input_gradient_kernel(
    dz_pointer,
    z_pointer,
    rate_pointer,
    slope_pointer,
    offset_pointer,
    dx_pointer,
    channels,
    rows,
    positions,
    image_stride,
    channel_stride,
    position_stride,
    SLOPE: tl.constexpr,
    DTYPE: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    r = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    mask = (c < channels)[:, None] & (r < rows)[None, :]
    rate = tl.load(rate_pointer + c, mask=c < channels, other=0).to(DTYPE)[:, None]
    slope_y = tl.load(slope_pointer + c, mask=c < channels, other=0).to(DTYPE)[:, None]
    offset = tl.load(offset_pointer + c, mask=c < channels, other=0).to(DTYPE)[:, None]
    offsets = _offsets(c, r, positions, image_stride, channel_stride, position_stride)
    dz = tl.load(dz_pointer + offsets, mask=mask, other=0).to(DTYPE)
    z = tl.load(z_pointer + offsets, mask=mask, other=0).to(DTYPE)
    dy, y = _invert_activation(dz, z, SLOPE)
    tl.store(dx_pointer + offsets, (rate * dy + slope_y * y + offset).to(dx_pointer.dtype.element_ty), mask=mask)
