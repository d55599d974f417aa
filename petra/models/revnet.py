"""Reversible residual networks as used in PETRA (Rivaud et al. 2024, Fig. 2), after Gomez et al. 2017."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import Tensor, nn

from petra.model import Model
from petra.models import layers
from petra.reversible import Coupling


class PairStem(nn.Module):
    """The stem at twice the channels, cut into the streams (x1, x2) of ``channels`` each."""

    def __init__(self, kind: str, channels: int) -> None:
        super().__init__()
        self.layers = layers.stem(kind, 2 * channels)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x1, x2 = self.layers(x).chunk(2, dim=1)
        # Dense copies: the next block then sees the same memory layout here as when the streams arrive in a message.
        return x1.clone(), x2.clone()


class Downsample(nn.Module):
    """The basic residual block that halves the image and doubles the channels; not reversible.

    x1, x2 of shape (B, in_channels, H, W) -> (h, shortcut(x1) + f(h)), each (B, channels, H/stride, W/stride), where
    h is the first convolution of x2, normalised and rectified: it goes on as the other stream without a shortcut.
    """

    def __init__(self, row: layers.Residual) -> None:
        super().__init__()
        first, second = row.convolutions()
        self.first = layers.conv_bn_relu(*first)
        self.second = layers.conv_bn_relu(*second)
        self.shortcut = layers.conv_bn(row.in_channels, row.channels, 1, row.stride)

    def forward(self, x1: Tensor, x2: Tensor) -> tuple[Tensor, Tensor]:
        h = self.first(x2)
        return h, self.shortcut(x1) + self.second(h)


class BottleneckResize(nn.Module):
    """The bottleneck block that changes the streams' shape, with a shortcut for each; not reversible.

    (x1, x2) -> (shortcut2(x2), shortcut1(x1) + f(x2)): from (B, in_channels, H, W) to (B, channels, H/stride, W/stride).
    """

    def __init__(self, row: layers.Residual) -> None:
        super().__init__()
        self.f = _branch(row)
        self.shortcut1 = layers.conv_bn(row.in_channels, row.channels, 1, row.stride)
        self.shortcut2 = layers.conv_bn(row.in_channels, row.channels, 1, row.stride)

    def forward(self, x1: Tensor, x2: Tensor) -> tuple[Tensor, Tensor]:
        return self.shortcut2(x2), self.shortcut1(x1) + self.f(x2)


def revnet18(classes: int = 10, width: float = 1.0, stem: str = "cifar") -> Model:
    """RevNet-18 as 10 blocks: the stem, eight residual blocks, of which five reversible, and the head.

    Each of the two streams is as wide as ResNet-18's only one. A residual block adds the ResNet's branch, ended by a
    ReLU, to a stream; nothing follows the addition, so that it can be undone. The head reads both streams.

    Input (B, 3, H, W), output logits (B, ``classes``); the arguments and errors are :func:`petra.models.resnet18`'s.
    """
    return _revnet("revnet18", (2, 2, 2, 2), 1, classes, width, stem)


def revnet34(classes: int = 10, width: float = 1.0, stem: str = "cifar") -> Model:
    """RevNet-34 as 18 blocks, of which 13 reversible; otherwise as :func:`revnet18`."""
    return _revnet("revnet34", (3, 4, 6, 3), 1, classes, width, stem)


def revnet50(classes: int = 10, width: float = 1.0, stem: str = "cifar") -> Model:
    """RevNet-50 as 18 blocks, of which 12 reversible, the residual ones bottlenecks; otherwise as :func:`revnet18`."""
    return _revnet("revnet50", (3, 4, 6, 3), 4, classes, width, stem)


def revnet101(classes: int = 10, width: float = 1.0, stem: str = "cifar") -> Model:
    """RevNet-101 as 35 blocks, of which 29 reversible; otherwise as :func:`revnet50`."""
    return _revnet("revnet101", (3, 4, 23, 3), 4, classes, width, stem)


def _revnet(name: str, repeats: Sequence[int], expansion: int, classes: int, width: float, stem: str) -> Model:
    channels = layers.checked_channels(classes, width, stem)
    rows = layers.residuals(repeats, channels, expansion)
    return layers.network(name, partial(PairStem, stem, channels), rows, _residual, streams=2, classes=classes)


def _residual(row: layers.Residual) -> nn.Module:
    if not row.resizes:
        return Coupling(_branch(row))
    return BottleneckResize(row) if row.bottleneck else Downsample(row)


def _branch(row: layers.Residual) -> nn.Sequential:
    return nn.Sequential(*(layer for sizes in row.convolutions() for layer in layers.conv_bn_relu(*sizes)))
