"""Reversible residual networks as used in PETRA (Rivaud et al. 2024, Fig. 2), after Gomez et al. 2017."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import Tensor, nn

from petra.model import BlockSpec, Model
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
    """The residual block that halves the image and changes the channels; not reversible.

    x1, x2 of shape (B, in_channels, H, W) -> (h, shortcut(x1) + f(h)), each (B, channels, H/stride, W/stride), where
    h is the first convolution of x2, normalised and rectified: it goes on as the other stream without a shortcut.
    """

    def __init__(self, in_channels: int, channels: int, stride: int) -> None:
        super().__init__()
        self.first = layers.conv_bn_relu(in_channels, channels, 3, stride)
        self.second = layers.conv_bn_relu(channels, channels, 3)
        self.shortcut = layers.conv_bn(in_channels, channels, 1, stride)

    def forward(self, x1: Tensor, x2: Tensor) -> tuple[Tensor, Tensor]:
        h = self.first(x2)
        return h, self.shortcut(x1) + self.second(h)


def revnet18(classes: int = 10, width: float = 1.0, stem: str = "cifar") -> Model:
    """RevNet-18 as 10 blocks: the stem, eight residual blocks, of which five reversible, and the head.

    Each of the two streams is as wide as ResNet-18's only one. A residual block adds the ResNet's branch, ended by a
    ReLU, to a stream; nothing follows the addition, so that it can be undone. The head reads both streams.

    Input (B, 3, H, W), output logits (B, ``classes``); the arguments and errors are :func:`petra.models.resnet18`'s.
    """
    return _revnet("revnet18", (2, 2, 2, 2), classes, width, stem)


def _revnet(name: str, repeats: Sequence[int], classes: int, width: float, stem: str) -> Model:
    channels = layers.checked_channels(classes, width, stem)
    rows = list(layers.residuals(repeats, channels))
    return Model(
        name,
        (
            BlockSpec("stem", partial(PairStem, stem, channels)),
            *(BlockSpec(row.name, partial(_residual, row)) for row in rows),
            BlockSpec("head", partial(layers.Head, 2 * rows[-1].channels, classes)),
        ),
    )


def _residual(row: layers.Residual) -> nn.Module:
    if row.stride != 1:
        return Downsample(row.in_channels, row.channels, row.stride)
    branch = (layers.conv_bn_relu(row.in_channels, row.channels, 3), layers.conv_bn_relu(row.channels, row.channels, 3))
    return Coupling(nn.Sequential(*branch[0], *branch[1]))
