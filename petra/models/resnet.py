"""Residual networks (He et al. 2015, "Deep residual learning for image recognition")."""

from __future__ import annotations

from functools import partial

from torch import Tensor, nn

from petra.errors import Positive
from petra.model import Model
from petra.models import layers


class ResidualBlock(nn.Module):
    """Residual block φ(shortcut(x) + branch(x)), basic or bottleneck (section 3.3, option B, and Fig. 5).

    Maps (B, in_channels, H, W) to (B, channels, H/stride, W/stride).

    Args:
        style: Normalisation and activation φ.
        row: Sizes of the block.
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
    classes: int = 10, width: Positive = 1.0, stem: str = "auto", norm: str = "batchnorm", activation: str | None = None
) -> Model:
    """Build a ResNet-18 (Table 1): 10 blocks (stem, eight residual blocks, head).

    Input: images (B, 3, H, W). Output: logits (B, ``classes``).

    Args:
        classes: Number of classes.
        width: Factor of all channel counts, which are 64, 128, 256 and 512 at 1.
        stem: ``cifar`` (3x3 convolution of stride 1, for images of 32x32 pixels), ``imagenet`` (7x7 convolution of stride 2 and
            3x3 max pooling of stride 2), or ``auto``: ``cifar``, and on the command line ``imagenet`` for images above 64 pixels.
        norm: ``batchnorm``; or, after the import of :mod:`petra.inplace_abn`, ``inplace_abn``, which stores half as much for the
            backward pass, or ``inplace_abn_sync``, the same with batch statistics that the replicas of a stage share.
        activation: ``relu`` or ``leaky_relu`` with slope 0.01. None selects ``relu`` for ``batchnorm`` and ``leaky_relu`` for
            InPlace-ABN, which can't invert ReLU.

    Raises:
        ConfigError: If an argument is out of range.
    """
    return layers.network("resnet18", resnet_body(18, width, stem, norm, activation), classes)


def resnet34(
    classes: int = 10, width: Positive = 1.0, stem: str = "auto", norm: str = "batchnorm", activation: str | None = None
) -> Model:
    """Build a ResNet-34: 18 blocks. Arguments as for :func:`resnet18`."""
    return layers.network("resnet34", resnet_body(34, width, stem, norm, activation), classes)


def resnet50(
    classes: int = 10, width: Positive = 1.0, stem: str = "auto", norm: str = "batchnorm", activation: str | None = None
) -> Model:
    """Build a ResNet-50: 18 blocks with bottlenecks, whose 3x3 convolution has the stride. Arguments as for :func:`resnet18`."""
    return layers.network("resnet50", resnet_body(50, width, stem, norm, activation), classes)


def resnet101(
    classes: int = 10, width: Positive = 1.0, stem: str = "auto", norm: str = "batchnorm", activation: str | None = None
) -> Model:
    """Build a ResNet-101: 35 blocks with bottlenecks, as in :func:`resnet50`. Arguments as for :func:`resnet18`."""
    return layers.network("resnet101", resnet_body(101, width, stem, norm, activation), classes)


def resnet_body(depth: int, width: float, stem: str, norm: str, activation: str | None) -> layers.Body:
    """Build a ResNet of 18, 34, 50 or 101 layers without its head. Other arguments and errors as for :func:`resnet18`."""
    repeats, expansion = layers.DEPTHS[depth]
    style = layers.Style.chosen(norm, activation)
    rows = layers.residuals(repeats, layers.scaled(layers.CHANNELS, width), expansion)
    return layers.Body(layers.stem_builder(stem, rows[0].in_channels, style), rows, partial(ResidualBlock, style), 1, style)
