"""Pre-activation ResNets and RevNets of equal size (Gomez et al. 2017, "The reversible residual network").

Normalisation and ReLU precede each convolution (He et al. 2016, "Identity mappings in deep residual networks"). The branch of the
first block starts with a convolution, since the stem ends with normalisation and ReLU. The head starts with them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import Tensor, nn

from petra.errors import Positive
from petra.model import Model
from petra.models import layers
from petra.reversible import TwoFunctionCoupling


class PreactivationBlock(nn.Module):
    """Residual block shortcut(x) + branch(x). Maps (B, in_channels, H, W) to (B, channels, H/stride, W/stride).

    Args:
        row: Sizes of the block.
        activated: Whether the input is already normalised and rectified.
    """

    def __init__(self, row: layers.Residual, *, activated: bool) -> None:
        super().__init__()
        self.branch = _branch(row, activated=activated)
        self.shortcut = _shortcut(row)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.shortcut(x) + self.branch(x)
        return y


class PairResize(nn.Module):
    """Non-reversible block of a RevNet that changes the shape of the streams, with a shortcut for each.

    y1 = shortcut1(x1) + f(x2) and y2 = shortcut2(x2) + g(y1) (Gomez et al. 2017, section 3.1).

    Args:
        row: Sizes of the block.
        activated: Whether x2 is already normalised and rectified.
    """

    def __init__(self, row: layers.Residual, *, activated: bool) -> None:
        super().__init__()
        self.f = _branch(row, activated=activated)
        self.g = _branch(row._replace(in_channels=row.channels, stride=1))  # reads the resized stream
        self.shortcut1 = _shortcut(row)
        self.shortcut2 = _shortcut(row)

    def forward(self, x1: Tensor, x2: Tensor) -> tuple[Tensor, Tensor]:
        y1 = self.shortcut1(x1) + self.f(x2)
        return y1, self.shortcut2(x2) + self.g(y1)


def resnet32(classes: int = 10, width: Positive = 1.0, stem: str = "auto") -> Model:
    """Build a pre-activation ResNet-32: 17 blocks (stem, 15 residual blocks in three layers, head).

    Input: images (B, 3, H, W). Output: logits (B, ``classes``).

    Args:
        classes: Number of classes.
        width: Factor of all channel counts, which are 16, 32 and 64 at 1.
        stem: ``cifar`` or ``imagenet``, as for :func:`petra.models.resnet18`.

    Raises:
        ConfigError: If an argument is out of range.
    """
    return _network("resnet32", (5, 5, 5), (16, 32, 64), 1, classes, width, stem)


def resnet110(classes: int = 10, width: Positive = 1.0, stem: str = "auto") -> Model:
    """Build a pre-activation ResNet-110: 56 blocks. Arguments as for :func:`resnet32`."""
    return _network("resnet110", (18, 18, 18), (16, 32, 64), 1, classes, width, stem)


def resnet164(classes: int = 10, width: Positive = 1.0, stem: str = "auto") -> Model:
    """Build a pre-activation ResNet-164: 56 blocks with bottlenecks. Arguments as for :func:`resnet32`."""
    return _network("resnet164", (18, 18, 18), (16, 32, 64), 4, classes, width, stem)


def resnet101_preact(classes: int = 10, width: Positive = 1.0, stem: str = "imagenet") -> Model:
    """Build a pre-activation ResNet-101: 35 blocks with bottlenecks. Arguments as for :func:`resnet32`."""
    return _network("resnet101_preact", (3, 4, 23, 3), (64, 128, 256, 512), 4, classes, width, stem)


def revnet38(classes: int = 10, width: Positive = 1.0, stem: str = "auto", partition: str = "channels") -> Model:
    """Build a RevNet-38: 11 blocks, of which 7 are reversible. Each block between stem and head has two functions.

    The streams have 16, 32 and 56 channels each at ``width`` 1.

    Args:
        classes, width, stem: As for :func:`resnet32`.
        partition: How the units are divided into streams: ``channels``, ``rows``, ``columns`` or ``checkerboard``
            (:func:`petra.models.layers.partitioned`).

    Raises:
        ConfigError: If an argument is out of range.
    """
    return _network("revnet38", (3, 3, 3), (16, 32, 56), 1, classes, width, stem, partition)


def revnet110(classes: int = 10, width: Positive = 1.0, stem: str = "auto", partition: str = "channels") -> Model:
    """Build a RevNet-110: 29 blocks, of which 25 are reversible, with streams of 16, 32 and 64 channels. See :func:`revnet38`."""
    return _network("revnet110", (9, 9, 9), (16, 32, 64), 1, classes, width, stem, partition)


def revnet164(classes: int = 10, width: Positive = 1.0, stem: str = "auto", partition: str = "channels") -> Model:
    """Build a RevNet-164: 29 blocks, of which 24 are reversible, with bottlenecks and streams of 64, 128 and 256 channels.

    See :func:`revnet38`.
    """
    return _network("revnet164", (9, 9, 9), (16, 32, 64), 4, classes, width, stem, partition)


def revnet104(classes: int = 10, width: Positive = 1.0, stem: str = "imagenet", partition: str = "channels") -> Model:
    """Build a RevNet-104: 19 blocks, of which 13 are reversible, with bottlenecks and streams of 256 to 1664 channels.

    See :func:`revnet38`.
    """
    return _network("revnet104", (2, 2, 11, 2), (64, 128, 256, 416), 4, classes, width, stem, partition)


def revnet602(classes: int = 10, width: Positive = 1.0, stem: str = "imagenet", partition: str = "channels") -> Model:
    """Build a RevNet of 602 layers: 102 blocks, of which 96 are reversible; a RevNet-104 whose third group has 94 blocks.

    Gomez et al. 2017 (appendix 7.2) train a RevNet of 600 layers without stating its layout. A block has six convolutions, so with
    stem and head 600 is not possible. See :func:`revnet38`.
    """
    return _network("revnet602", (2, 2, 94, 2), (64, 128, 256, 416), 4, classes, width, stem, partition)


def _network(
    name: str,
    repeats: Sequence[int],
    hidden: Sequence[int],
    expansion: int,
    classes: int,
    width: float,
    stem: str,
    partition: str | None = None,
) -> Model:
    """Build a ResNet, or a RevNet whose streams are divided by ``partition``. Other arguments as for the bodies of ResNets."""
    rows = layers.residuals(repeats, layers.scaled(hidden, width), expansion)
    start = layers.stem_builder(stem, rows[0].in_channels, partition=partition)
    block = partial(_block, rows[0], reversible=partition is not None)
    return layers.network(name, layers.Body(start, rows, block, 1 if partition is None else 2, preactivation=True), classes)


def _block(first: layers.Residual, row: layers.Residual, *, reversible: bool) -> nn.Module:
    if not reversible:
        return PreactivationBlock(row, activated=row == first)
    if row.resizes:
        return PairResize(row, activated=row == first)
    return TwoFunctionCoupling(_branch(row, activated=row == first), _branch(row))


def _branch(row: layers.Residual, *, activated: bool = False) -> nn.Sequential:
    """Build a branch. The first convolution has the stride, also in bottlenecks, as in the authors' code."""
    modules: list[nn.Module] = []
    for i, (in_channels, channels, kernel, *_) in enumerate(row.convolutions()):
        if i or not activated:
            modules += layers.norm_act(in_channels)
        modules.append(layers.conv(in_channels, channels, kernel, 1 if i else row.stride))
    return nn.Sequential(*modules)


def _shortcut(row: layers.Residual) -> nn.Module:
    if not row.resizes:
        return nn.Identity()
    return layers.conv(row.in_channels, row.channels, 1, row.stride) if row.bottleneck else layers.PoolAndPad(row)
