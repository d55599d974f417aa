"""Residual networks of He et al. 2015, "Deep residual learning for image recognition"."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import Tensor, nn

from petra.model import Model
from petra.models import layers


class ResidualBlock(nn.Module):
    """φ(shortcut(x) + branch(x)) with the activation φ, basic or bottleneck (section 3.3, option B, and Fig. 5).

    (B, in_channels, H, W) -> (B, channels, H/stride, W/stride).
    """

    def __init__(self, style: layers.Style, row: layers.Residual) -> None:
        super().__init__()
        *inner, last = row.convolutions()
        self.branch = nn.Sequential(
            *(layer for sizes in inner for layer in layers.conv_norm(*sizes, style=style)),
            *layers.conv_norm(*last, style=style, activate=False),
        )
        self.shortcut: nn.Module = nn.Identity()
        if row.resizes:
            self.shortcut = layers.conv_norm(row.in_channels, row.channels, 1, row.stride, style=style, activate=False)
        self.style = style

    def forward(self, x: Tensor) -> Tensor:
        return self.style.activate_(self.shortcut(x) + self.branch(x))


def resnet18(
    classes: int = 10, width: float = 1.0, stem: str = "cifar", norm: str = "batchnorm", activation: str | None = None
) -> Model:
    """ResNet-18 (Table 1) as 10 blocks: the stem, eight residual blocks, the head.

    Input (B, 3, H, W), output logits (B, ``classes``). ``width`` scales all channel counts (64, 128, 256, 512 at 1).
    ``stem`` is ``imagenet`` (7x7 at stride 2, then 3x3 max pooling at stride 2) or ``cifar`` (3x3 at stride 1, for
    images of 32x32 pixels). ``norm`` is ``batchnorm`` or ``inplace_abn``, which keeps half as much between forward and backward
    (:class:`petra.nn.InPlaceABN`); ``activation`` is ``relu`` or ``leaky_relu`` of slope 0.01, by default ``relu`` after
    ``batchnorm`` and, since ReLU can't be undone, ``leaky_relu`` with ``inplace_abn``.

    Raises:
        ConfigError: arguments out of range.
    """
    return _resnet("resnet18", (2, 2, 2, 2), 1, classes, width, stem, norm, activation)


def resnet34(
    classes: int = 10, width: float = 1.0, stem: str = "cifar", norm: str = "batchnorm", activation: str | None = None
) -> Model:
    """ResNet-34 as 18 blocks; otherwise as :func:`resnet18`."""
    return _resnet("resnet34", (3, 4, 6, 3), 1, classes, width, stem, norm, activation)


def resnet50(
    classes: int = 10, width: float = 1.0, stem: str = "cifar", norm: str = "batchnorm", activation: str | None = None
) -> Model:
    """ResNet-50 as 18 blocks, the residual ones bottlenecks with stride in the 3x3; otherwise as :func:`resnet18`."""
    return _resnet("resnet50", (3, 4, 6, 3), 4, classes, width, stem, norm, activation)


def resnet101(
    classes: int = 10, width: float = 1.0, stem: str = "cifar", norm: str = "batchnorm", activation: str | None = None
) -> Model:
    """ResNet-101 as 35 blocks; otherwise as :func:`resnet50`."""
    return _resnet("resnet101", (3, 4, 23, 3), 4, classes, width, stem, norm, activation)


def _resnet(
    name: str,
    repeats: Sequence[int],
    expansion: int,
    classes: int,
    width: float,
    stem: str,
    norm: str,
    activation: str | None,
) -> Model:
    hidden = layers.scaled((64, 128, 256, 512), width)
    rows = layers.residuals(repeats, hidden[0], hidden, expansion)
    return residual_network(name, rows, classes, stem, layers.Style.chosen(norm, activation))


def residual_network(name: str, rows: Sequence[layers.Residual], classes: int, stem: str, style: layers.Style) -> Model:
    """The network of a table of :class:`ResidualBlock`."""
    start = partial(layers.stem, layers.choice("stem", stem, layers.STEMS), rows[0].in_channels, style)
    return layers.network(name, start, rows, partial(ResidualBlock, style), streams=1, classes=classes)
