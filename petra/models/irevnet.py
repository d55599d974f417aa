"""i-RevNets (Jacobsen et al. 2018, "i-RevNet: deep invertible networks"), in which every residual block is reversible."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor, nn

from petra.errors import Positive, require
from petra.model import Model
from petra.models import layers
from petra.reversible import Coupling, DownsamplingCoupling


class InvertibleStem(nn.Module):
    """Invertible stem without parameters. Maps an image (B, 3, H, W) to two streams (B, channels, H/factor, W/factor).

    It moves pixels to channels, gives half of the channels to each stream, and pads each stream with zero channels. The map is
    bijective if 2 · channels = 3 · factor², and injective if 2 · channels is larger.

    Args:
        factor: Factor by which the image is downsampled.
        channels: Channels of each stream.
    """

    def __init__(self, factor: int, channels: int) -> None:
        super().__init__()
        self.factor = factor
        self.channels = channels

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the two streams of an image."""
        x1, x2 = (self._padded(half) for half in nn.functional.pixel_unshuffle(x, self.factor).tensor_split(2, dim=1))
        return x1, x2

    def inverse(self, y1: Tensor, y2: Tensor) -> Tensor:
        """Return the image of two streams."""
        channels = 3 * self.factor**2
        halves = y1[:, : -(-channels // 2)], y2[:, : channels // 2]
        return nn.functional.pixel_shuffle(torch.cat(halves, dim=1), self.factor)

    def _padded(self, half: Tensor) -> Tensor:
        padded = half.new_zeros(half.shape[0], self.channels, *half.shape[2:])
        padded[:, : half.shape[1]] = half
        return padded


def irevnet163(classes: int = 10, width: Positive = 1.0) -> Model:
    """Build the authors' i-RevNet for images of 32x32 pixels: 56 blocks, all reversible except the stem and the head.

    The network is injective. The stem pads the image with zero channels to two streams of 16 channels, and two reversible
    downsampling blocks increase them to 64 and 256. A branch has three 3x3 convolutions, as in the published code.

    Input: images (B, 3, H, W), H and W multiples of 4. Output: logits (B, ``classes``).

    Args:
        classes: Number of classes.
        width: Factor of all channel counts, a multiple of 1/4.

    Raises:
        ConfigError: If an argument is out of range.
    """
    return _irevnet("irevnet163", (18, 18, 18), (1, 2, 2), 1, 16, (3, 3, 3), classes, width)


def irevnet301(classes: int = 1000, width: Positive = 1.0) -> Model:
    """Build the paper's i-RevNet (b) for ImageNet: 102 blocks, all reversible except the stem and the head.

    The network is bijective. The streams have 6 channels after the stem, and 24, 96, 384 and 1536 after the four reversible
    downsampling blocks. A branch is a bottleneck of 1x1, 3x3 and 1x1 convolutions (section 3.2).

    Input: images (B, 3, H, W), H and W multiples of 32. Output: logits (B, ``classes``).

    Args:
        classes: Number of classes.
        width: Factor of all channel counts, a multiple of 1/6 and >= 1. Above 1 the stem pads the image with zero channels, and
            the network is injective.

    Raises:
        ConfigError: If an argument is out of range.
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
    """Build an i-RevNet from a table of layers.

    Args:
        name: Name of the model.
        repeats: Number of blocks of each layer.
        strides: Stride of the first block of each layer. A stride multiplies the channels by its square.
        factor: Factor by which the stem downsamples.
        channels: Channels of each stream after the stem, at ``width`` 1.
        kernels: Kernel sizes of a branch's three convolutions.
        classes, width: As for :func:`irevnet163`.
    """
    channels, _ = layers.scaled((channels, channels * strides[0] ** 2 // 4), width)
    require(2 * channels >= 3 * factor**2, "model.width", f"a number >= 1, since the stem of {name} must be injective", width)
    stem = partial(InvertibleStem, factor, channels)
    rows = []
    for layer, (repeat, stride) in enumerate(zip(repeats, strides, strict=True)):
        for i in range(repeat):
            wider = channels * (stride**2 if i == 0 else 1)
            rows.append(layers.Residual(f"layer{layer + 1}_{i}", channels, wider // 4, wider, stride if i == 0 else 1))
            channels = wider
    residual = partial(_residual, rows[0], kernels)
    return layers.network(layers.Body(name, stem, rows, residual, streams=2, preactivation=True), classes)


def _residual(first: layers.Residual, kernels: Sequence[int], row: layers.Residual) -> nn.Module:
    """Build a block. The first 3x3 convolution of its branch has the stride. The first branch of a network reads the image."""
    widths = pairwise((row.in_channels, row.hidden, row.hidden, row.channels))
    strides = (row.stride if i == kernels.index(3) else 1 for i in range(3))
    sizes = ((a, b, kernel, stride) for (a, b), kernel, stride in zip(widths, kernels, strides, strict=True))
    branch = layers.preactivated(sizes, activated=row == first)
    return Coupling(branch) if row.stride == 1 else DownsamplingCoupling(branch, row.stride)
