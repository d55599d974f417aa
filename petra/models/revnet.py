"""Reversible residual networks as used in PETRA (Rivaud et al. 2024, Fig. 2), after Gomez et al. 2017."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import Tensor, nn

from petra.model import Model
from petra.models import layers
from petra.reversible import Coupling

DOWNSAMPLINGS = ("projection", "convolution")


class Downsample(nn.Module):
    """A block that changes the streams' shape and passes the resized x2 on as the other stream; not reversible.

    x1, x2 of shape (B, in_channels, H, W) -> (h, shortcut(x1) + second(h)), each (B, channels, H/stride, W/stride), where
    h = first(x2).
    """

    def __init__(self, style: layers.Style, row: layers.Residual, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first = first
        self.second = second
        self.shortcut = layers.conv_norm(row.in_channels, row.channels, 1, row.stride, style=style, activate=False)

    def forward(self, x1: Tensor, x2: Tensor) -> tuple[Tensor, Tensor]:
        h = self.first(x2)
        return h, self.shortcut(x1) + self.second(h)


class BottleneckResize(nn.Module):
    """The bottleneck block that changes the streams' shape, with a shortcut for each; not reversible.

    (x1, x2) -> (shortcut2(x2), shortcut1(x1) + f(x2)): from (B, in_channels, H, W) to (B, channels, H/stride, W/stride).
    """

    def __init__(self, style: layers.Style, row: layers.Residual) -> None:
        super().__init__()
        self.f = _branch(style, row)
        self.shortcut1 = layers.conv_norm(row.in_channels, row.channels, 1, row.stride, style=style, activate=False)
        self.shortcut2 = layers.conv_norm(row.in_channels, row.channels, 1, row.stride, style=style, activate=False)

    def forward(self, x1: Tensor, x2: Tensor) -> tuple[Tensor, Tensor]:
        return self.shortcut2(x2), self.shortcut1(x1) + self.f(x2)


def revnet18(
    classes: int = 10, width: float = 1.0, stem: str = "cifar", norm: str = "batchnorm", activation: str | None = None
) -> Model:
    """RevNet-18 as 10 blocks: the stem, eight residual blocks, of which five reversible, and the head.

    Each of the two streams is as wide as ResNet-18's only one. A residual block adds the ResNet's branch, ended by a
    ReLU, to a stream; nothing follows the addition, so that it can be undone. The head reads both streams. A block that
    halves the image passes its first convolution of x2, normalised and rectified, on as the other stream.

    Input (B, 3, H, W), output logits (B, ``classes``); the arguments and errors are :func:`petra.models.resnet18`'s.
    """
    return _revnet("revnet18", (2, 2, 2, 2), 1, classes, width, stem, norm, activation)


def revnet34(
    classes: int = 10, width: float = 1.0, stem: str = "cifar", norm: str = "batchnorm", activation: str | None = None
) -> Model:
    """RevNet-34 as 18 blocks, of which 13 reversible; otherwise as :func:`revnet18`."""
    return _revnet("revnet34", (3, 4, 6, 3), 1, classes, width, stem, norm, activation)


def revnet50(
    classes: int = 10,
    width: float = 1.0,
    stem: str = "cifar",
    downsampling: str = "projection",
    norm: str = "batchnorm",
    activation: str | None = None,
) -> Model:
    """RevNet-50 as 18 blocks, of which 12 reversible, the residual ones bottlenecks; otherwise as :func:`revnet18`.

    ``downsampling`` is that of the four blocks that change the streams' shape. ``projection``: the branch reads x2 as it is,
    and a 1x1 convolution resizes each stream. ``convolution``: a 3x3 convolution resizes x2, then the branch reads the result,
    which also goes on as the other stream; this is the heavier network, of 53.2 million parameters against 30.4.
    """
    return _revnet("revnet50", (3, 4, 6, 3), 4, classes, width, stem, norm, activation, downsampling)


def revnet101(
    classes: int = 10, width: float = 1.0, stem: str = "cifar", norm: str = "batchnorm", activation: str | None = None
) -> Model:
    """RevNet-101 as 35 blocks, of which 29 reversible; otherwise as :func:`revnet50`."""
    return _revnet("revnet101", (3, 4, 23, 3), 4, classes, width, stem, norm, activation)


def _revnet(
    name: str,
    repeats: Sequence[int],
    expansion: int,
    classes: int,
    width: float,
    stem: str,
    norm: str,
    activation: str | None,
    downsampling: str = "projection",
) -> Model:
    style = layers.Style.chosen(norm, activation)
    hidden = layers.scaled((64, 128, 256, 512), width)
    rows = layers.residuals(repeats, hidden[0], hidden, expansion)
    start = partial(layers.PairStem, layers.choice("stem", stem, layers.STEMS), hidden[0], style)
    residual = partial(_residual, style, layers.choice("downsampling", downsampling, DOWNSAMPLINGS))
    return layers.network(name, start, rows, residual, streams=2, classes=classes)


def _residual(style: layers.Style, downsampling: str, row: layers.Residual) -> nn.Module:
    if not row.resizes:
        return Coupling(_branch(style, row))
    if not row.bottleneck:
        first, second = (layers.conv_norm(*sizes, style=style) for sizes in row.convolutions())
        return Downsample(style, row, first, second)
    if downsampling == "projection":
        return BottleneckResize(style, row)
    resize = layers.conv_norm(row.in_channels, row.channels, 3, row.stride, style=style, activate=False)
    return Downsample(style, row, resize, _branch(style, row._replace(in_channels=row.channels, stride=1)))


def _branch(style: layers.Style, row: layers.Residual) -> nn.Sequential:
    return nn.Sequential(*(layer for sizes in row.convolutions() for layer in layers.conv_norm(*sizes, style=style)))
