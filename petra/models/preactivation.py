"""The networks of Gomez et al. 2017, "The reversible residual network": pre-activation ResNets and RevNets of equal size.

Normalisation and ReLU come before each convolution (He et al. 2016, "Identity mappings in deep residual networks"). The first
block's branch has none in front, since the stem ends with them; behind the last block the head does.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import Tensor, nn

from petra.model import Model
from petra.models import layers
from petra.reversible import TwoFunctionCoupling


class PoolAndPad(nn.Module):
    """A shortcut without parameters: (B, C, H, W) is averaged down to (B, C, H/stride, W/stride), then padded with zero channels.

    Half of the new channels come before the old ones and half behind.
    """

    def __init__(self, row: layers.Residual) -> None:
        super().__init__()
        self.pool = nn.AvgPool2d(row.stride)
        self.before = (row.channels - row.in_channels) // 2
        self.behind = row.channels - row.in_channels - self.before

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.pad(self.pool(x), (0, 0, 0, 0, self.before, self.behind))


class PreactivationBlock(nn.Module):
    """shortcut(x) + branch(x): (B, in_channels, H, W) -> (B, channels, H/stride, W/stride).

    Args:
        activated: the input comes normalised and rectified.
    """

    def __init__(self, row: layers.Residual, *, activated: bool) -> None:
        super().__init__()
        self.branch = _branch(row, activated=activated)
        self.shortcut = _shortcut(row)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.shortcut(x) + self.branch(x)
        return y


class PairResize(nn.Module):
    """RevNet's block where the streams change their shape, with a shortcut for each; not reversible.

    (x1, x2) -> (y1, y2) with y1 = shortcut1(x1) + f(x2) and y2 = shortcut2(x2) + g(y1) (Gomez et al. 2017, section 3.1).
    """

    def __init__(self, row: layers.Residual, *, activated: bool) -> None:
        super().__init__()
        self.f = _branch(row, activated=activated)
        self.g = _branch(_resized(row))
        self.shortcut1 = _shortcut(row)
        self.shortcut2 = _shortcut(row)

    def forward(self, x1: Tensor, x2: Tensor) -> tuple[Tensor, Tensor]:
        y1 = self.shortcut1(x1) + self.f(x2)
        return y1, self.shortcut2(x2) + self.g(y1)


def resnet32(classes: int = 10, width: float = 1.0, stem: str = "cifar") -> Model:
    """ResNet-32 with pre-activation as 17 blocks: the stem, 15 residual blocks in three layers, the head.

    Input (B, 3, H, W), output logits (B, ``classes``). ``width`` scales all channel counts (16, 32, 64 at 1). ``stem`` is
    :func:`petra.models.resnet18`'s. Raises :class:`petra.errors.ConfigError` for arguments out of range.
    """
    return _resnet("resnet32", (5, 5, 5), (16, 32, 64), 1, classes, width, stem)


def resnet110(classes: int = 10, width: float = 1.0, stem: str = "cifar") -> Model:
    """ResNet-110 with pre-activation as 56 blocks; otherwise as :func:`resnet32`."""
    return _resnet("resnet110", (18, 18, 18), (16, 32, 64), 1, classes, width, stem)


def resnet164(classes: int = 10, width: float = 1.0, stem: str = "cifar") -> Model:
    """ResNet-164 with pre-activation as 56 blocks, the residual ones bottlenecks; otherwise as :func:`resnet32`."""
    return _resnet("resnet164", (18, 18, 18), (16, 32, 64), 4, classes, width, stem)


def resnet101_preact(classes: int = 10, width: float = 1.0, stem: str = "imagenet") -> Model:
    """ResNet-101 with pre-activation as 35 blocks, the residual ones bottlenecks; otherwise as :func:`resnet32`."""
    return _resnet("resnet101_preact", (3, 4, 23, 3), (64, 128, 256, 512), 4, classes, width, stem)


def revnet38(classes: int = 10, width: float = 1.0, stem: str = "cifar") -> Model:
    """RevNet-38 as 11 blocks: the stem, nine blocks of two functions each, of which seven reversible, and the head.

    The streams have 16, 32 and 56 channels each at ``width`` 1; otherwise as :func:`resnet32`.
    """
    return _revnet("revnet38", (3, 3, 3), (16, 32, 56), 1, classes, width, stem)


def revnet110(classes: int = 10, width: float = 1.0, stem: str = "cifar") -> Model:
    """RevNet-110 as 29 blocks, of which 25 reversible; streams of 16, 32 and 64 channels; otherwise as :func:`revnet38`."""
    return _revnet("revnet110", (9, 9, 9), (16, 32, 64), 1, classes, width, stem)


def revnet164(classes: int = 10, width: float = 1.0, stem: str = "cifar") -> Model:
    """RevNet-164 as 29 blocks, of which 24 reversible; bottlenecks, streams of 64, 128 and 256; otherwise as :func:`revnet38`."""
    return _revnet("revnet164", (9, 9, 9), (16, 32, 64), 4, classes, width, stem)


def revnet104(classes: int = 10, width: float = 1.0, stem: str = "imagenet") -> Model:
    """RevNet-104 as 19 blocks, of which 13 reversible; bottlenecks, streams of 256 to 1664; otherwise as :func:`revnet38`."""
    return _revnet("revnet104", (2, 2, 11, 2), (64, 128, 256, 416), 4, classes, width, stem)


def _resnet(
    name: str, repeats: Sequence[int], hidden: Sequence[int], expansion: int, classes: int, width: float, stem: str
) -> Model:
    hidden = layers.scaled(hidden, width)
    rows = layers.residuals(repeats, hidden[0], hidden, expansion)
    start = partial(layers.stem, layers.choice("stem", stem, layers.STEMS), hidden[0])
    residual = partial(_preactivation_block, rows[0])
    return layers.network(name, start, rows, residual, streams=1, classes=classes, head=layers.ActivatedHead)


def _revnet(
    name: str, repeats: Sequence[int], hidden: Sequence[int], expansion: int, classes: int, width: float, stem: str
) -> Model:
    hidden = layers.scaled(hidden, width)
    rows = layers.residuals(repeats, hidden[0], hidden, expansion)
    start = partial(layers.PairStem, layers.choice("stem", stem, layers.STEMS), hidden[0])
    residual = partial(_two_function_block, rows[0])
    return layers.network(name, start, rows, residual, streams=2, classes=classes, head=layers.ActivatedHead)


def _preactivation_block(first: layers.Residual, row: layers.Residual) -> nn.Module:
    return PreactivationBlock(row, activated=row == first)


def _two_function_block(first: layers.Residual, row: layers.Residual) -> nn.Module:
    if row.resizes:
        return PairResize(row, activated=row == first)
    return TwoFunctionCoupling(_branch(row, activated=row == first), _branch(row))


def _branch(row: layers.Residual, *, activated: bool = False) -> nn.Sequential:
    """Normalisation, ReLU and convolution in turn; the first two are left out of an input that is ``activated`` already.

    The first convolution has the stride, in bottlenecks too (as in the authors' code).
    """
    made: list[nn.Module] = []
    for (in_channels, channels, kernel, *_), stride in zip(row.convolutions(), (row.stride, 1, 1), strict=False):
        made += [] if activated and not made else layers.norm_act(in_channels)
        made.append(layers.conv(in_channels, channels, kernel, stride))
    return nn.Sequential(*made)


def _shortcut(row: layers.Residual) -> nn.Module:
    if not row.resizes:
        return nn.Identity()
    return layers.conv(row.in_channels, row.channels, 1, row.stride) if row.bottleneck else PoolAndPad(row)


def _resized(row: layers.Residual) -> layers.Residual:
    """The row of G, which reads the resized stream."""
    return row._replace(in_channels=row.channels, stride=1)
