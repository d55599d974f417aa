"""Fully invertible networks of Jacobsen et al. 2018, "i-RevNet: deep invertible networks": every residual block is reversible."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

from petra.errors import ConfigError
from petra.model import Model
from petra.models import layers
from petra.reversible import Coupling, DownsamplingCoupling


class InvertibleStem(nn.Module):
    """The image as two streams, with nothing lost and no parameters: (B, 3, H, W) -> two of (B, channels, H/factor, W/factor).

    Pixels move to channels, of which each stream gets half; zero channels fill up the rest. Bijective where
    2 · channels = 3 · factor², injective where greater.
    """

    def __init__(self, factor: int, channels: int) -> None:
        super().__init__()
        self.factor = factor
        self.channels = channels

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x1, x2 = (self._filled(half) for half in nn.functional.pixel_unshuffle(x, self.factor).tensor_split(2, dim=1))
        return x1, x2

    def inverse(self, y1: Tensor, y2: Tensor) -> Tensor:
        """The image from its streams."""
        channels = 3 * self.factor**2
        halves = y1[:, : -(-channels // 2)], y2[:, : channels // 2]
        return nn.functional.pixel_shuffle(torch.cat(halves, dim=1), self.factor)

    def _filled(self, half: Tensor) -> Tensor:
        filled = half.new_zeros(half.shape[0], self.channels, *half.shape[2:])
        filled[:, : half.shape[1]] = half
        return filled


def irevnet163(classes: int = 10, width: float = 1.0) -> Model:
    """The authors' i-RevNet for images of 32x32 pixels as 56 blocks, of which all but the stem and the head are reversible.

    Injective: zero channels widen the image to two streams of 16 channels; two reversible downsamplings make that 64 and 256.
    The branches are three 3x3 convolutions, as in the published code.

    Input (B, 3, H, W) with H and W multiples of 4, output logits (B, ``classes``). ``width`` scales all channel counts, in
    multiples of 1/4. Raises :class:`petra.errors.ConfigError` for arguments out of range.
    """
    return _irevnet("irevnet163", (18, 18, 18), (1, 2, 2), 1, 16, (3, 3, 3), classes, width)


def irevnet301(classes: int = 1000, width: float = 1.0) -> Model:
    """The paper's i-RevNet (b) for ImageNet as 102 blocks, of which all but the stem and the head are reversible.

    The streams have 6 channels behind the stem and 24, 96, 384 and 1536 behind the four reversible downsamplings: bijective. A
    ``width`` above 1, in multiples of 1/6, pads the image with zero channels: injective. The branches are bottlenecks with 1x1,
    3x3 and 1x1 convolutions (section 3.2). H and W are multiples of 32; otherwise as :func:`irevnet163`.
    """
    return _irevnet("irevnet301", (6, 16, 72, 6), (2, 2, 2, 2), 2, 6, (1, 3, 1), classes, width)


def _irevnet(
    name: str,
    repeats: Sequence[int],
    strides: Sequence[int],
    factor: int,
    channels: int,
    kernels: Sequence[int],
    classes: int,
    width: float,
) -> Model:
    """Layers of ``repeats`` blocks; at the start of each a downsampling by its stride, which multiplies the channels by its square.

    Args:
        factor: by which the stem downsamples.
        channels: of each stream behind the stem.
        kernels: sizes of a branch's three convolutions.
    """
    channels, _ = layers.scaled((channels, channels * strides[0] ** 2 // 4), width)
    if 2 * channels < 3 * factor**2:
        raise ConfigError(f"model.width: found {width}, accepted are numbers from 1 on, so that {name} can hold its input")
    start = partial(InvertibleStem, factor, channels)
    rows = []
    for layer, (repeat, stride) in enumerate(zip(repeats, strides, strict=True)):
        for i in range(repeat):
            wider = channels * (stride**2 if i == 0 else 1)
            rows.append(layers.Residual(f"layer{layer + 1}_{i}", channels, wider // 4, wider, stride if i == 0 else 1))
            channels = wider
    residual = partial(_residual, rows[0], kernels)
    return layers.network(name, start, rows, residual, streams=2, classes=classes, head=layers.ActivatedHead)


def _residual(first: layers.Residual, kernels: Sequence[int], row: layers.Residual) -> nn.Module:
    branch = _branch(row, kernels, raw=row == first)
    return Coupling(branch) if row.stride == 1 else DownsamplingCoupling(branch, row.stride)


def _branch(row: layers.Residual, kernels: Sequence[int], *, raw: bool) -> nn.Sequential:
    """Normalisation, ReLU and convolution three times; the first two are left out of the input of the network (``raw``).

    The first 3x3 convolution has the stride.
    """
    widths = (row.in_channels, row.hidden, row.hidden, row.channels)
    made: list[nn.Module] = []
    for i, kernel in enumerate(kernels):
        made += [] if raw and i == 0 else layers.norm_act(widths[i])
        made.append(layers.conv(widths[i], widths[i + 1], kernel, row.stride if i == kernels.index(3) else 1))
    return nn.Sequential(*made)
