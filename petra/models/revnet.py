"""Reversible residual networks of PETRA (Rivaud et al. 2024, Fig. 2), based on Gomez et al. 2017."""

from __future__ import annotations

from functools import partial

from torch import Tensor, nn

from petra.errors import Positive, alternatives, require
from petra.model import Model
from petra.models import layers
from petra.reversible import Coupling

DOWNSAMPLINGS = ("projection", "pooling", "variant")


class Downsample(nn.Module):
    """Non-reversible basic block that changes the shape of the streams and returns the resized x2 as the other stream.

    y1 = first(x2) and y2 = shortcut(x1) + second(y1). Maps two streams (B, in_channels, H, W) to two streams
    (B, channels, H/stride, W/stride).

    Args:
        style: Normalisation and activation.
        row: Sizes of the block.
    """

    def __init__(self, style: layers.Style, row: layers.Residual) -> None:
        super().__init__()
        self.first, self.second = (layers.conv_norm(*sizes, style=style) for sizes in row.convolutions())
        self.shortcut = layers.conv_norm(row.in_channels, row.channels, 1, row.stride, style=style, activate=False)

    def forward(self, x1: Tensor, x2: Tensor) -> tuple[Tensor, Tensor]:
        h = self.first(x2)
        return h, self.shortcut(x1) + self.second(h)


class BottleneckResize(nn.Module):
    """Non-reversible bottleneck block that changes the shape of the streams, with a shortcut for each.

    y1 = shortcut2(x2) and y2 = shortcut1(x1) + f(x2), or shortcut1(x1) + f(y1) with the kind ``variant``. Maps two streams
    (B, in_channels, H, W) to two streams (B, channels, H/stride, W/stride).

    Args:
        style: Normalisation and activation.
        kind: One of :data:`DOWNSAMPLINGS`, see :func:`revnet50`.
        row: Sizes of the block.
    """

    def __init__(self, style: layers.Style, kind: str, row: layers.Residual) -> None:
        super().__init__()
        self.late = kind == "variant"
        self.f = branch(style, row._replace(in_channels=row.channels, stride=1) if self.late else row)
        resize = partial(layers.conv_norm, row.in_channels, row.channels, stride=row.stride, style=style, activate=False)
        self.shortcut1 = layers.PoolAndPad(row) if kind == "pooling" else resize(1)
        self.shortcut2 = resize(1 if kind == "projection" else 3)

    def forward(self, x1: Tensor, x2: Tensor) -> tuple[Tensor, Tensor]:
        y1 = self.shortcut2(x2)
        return y1, self.shortcut1(x1) + self.f(y1 if self.late else x2)


def revnet18(
    classes: int = 10, width: Positive = 1.0, stem: str = "auto", norm: str = "batchnorm", activation: str | None = None
) -> Model:
    """Build a RevNet-18: 10 blocks (stem, eight residual blocks, of which five are reversible, head).

    Each of the two streams has the channels of ResNet-18. A residual block adds the ResNet's branch, which ends with a ReLU, to a
    stream. No ReLU follows the addition, so that the block is invertible. A downsampling block returns its first convolution of
    x2, normalised and rectified, as the other stream. The head reads both streams.

    Input: images (B, 3, H, W). Output: logits (B, ``classes``). Arguments and errors as for :func:`petra.models.resnet18`.
    """
    return layers.network("revnet18", revnet_body(18, width, stem, norm, activation), classes)


def revnet34(
    classes: int = 10, width: Positive = 1.0, stem: str = "auto", norm: str = "batchnorm", activation: str | None = None
) -> Model:
    """Build a RevNet-34: 18 blocks, of which 13 are reversible. Arguments as for :func:`revnet18`."""
    return layers.network("revnet34", revnet_body(34, width, stem, norm, activation), classes)


def revnet50(
    classes: int = 10,
    width: Positive = 1.0,
    stem: str = "auto",
    downsampling: str = "projection",
    norm: str = "batchnorm",
    activation: str | None = None,
) -> Model:
    """Build a RevNet-50: 18 blocks with bottlenecks, of which 12 are reversible.

    Args:
        classes, width, stem, norm, activation: As for :func:`revnet18`.
        downsampling: Kind of the four blocks that change the shape of the streams. ``projection``: the branch reads x2, and a 1x1
            convolution resizes each stream; 30.4 million parameters with the ImageNet stem and head. ``pooling``: the branch
            reads x2, a 3x3 convolution resizes x2, and average pooling and zero channels resize x1; 49.8 million parameters, the
            layout closest to the 50 million that PETRA's section 4.1 mentions. ``variant`` (``BottleneckVariant`` in the
            authors' code, with a kernel that fits its padding): a 3x3 convolution resizes x2, the branch reads the resized x2, and
            a 1x1 convolution resizes x1; 53.2 million parameters.

    Raises:
        ConfigError: If an argument is out of range.
    """
    return layers.network("revnet50", revnet_body(50, width, stem, norm, activation, downsampling), classes)


def revnet101(
    classes: int = 10, width: Positive = 1.0, stem: str = "auto", norm: str = "batchnorm", activation: str | None = None
) -> Model:
    """Build a RevNet-101: 35 blocks with bottlenecks, of which 29 are reversible. Arguments as for :func:`revnet18`."""
    return layers.network("revnet101", revnet_body(101, width, stem, norm, activation), classes)


def revnet_body(
    depth: int, width: float, stem: str, norm: str, activation: str | None = None, downsampling: str = "projection"
) -> layers.Body:
    """Build a RevNet of 18, 34, 50 or 101 layers without its head. Other arguments and errors as for :func:`revnet50`."""
    require(downsampling in DOWNSAMPLINGS, "model.downsampling", alternatives(DOWNSAMPLINGS), downsampling)
    repeats, expansion = layers.DEPTHS[depth]
    style = layers.Style.chosen(norm, activation)
    rows = layers.residuals(repeats, layers.scaled(layers.CHANNELS, width), expansion)
    start = layers.stem_builder(stem, rows[0].in_channels, style, "channels")
    return layers.Body(start, rows, partial(_residual, style, downsampling), 2, style)


def _residual(style: layers.Style, downsampling: str, row: layers.Residual) -> nn.Module:
    if not row.resizes:
        return Coupling(branch(style, row))
    return BottleneckResize(style, downsampling, row) if row.bottleneck else Downsample(style, row)


def branch(style: layers.Style, row: layers.Residual) -> nn.Sequential:
    """Return the residual function of a block, which ends with an activation."""
    return nn.Sequential(*(layer for sizes in row.convolutions() for layer in layers.conv_norm(*sizes, style=style)))
