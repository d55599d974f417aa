"""Residual networks of He et al. 2015, "Deep residual learning for image recognition"."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import Tensor, nn

from petra.model import BlockSpec, Model
from petra.models import layers


class BasicBlock(nn.Module):
    """ReLU(shortcut(x) + branch(x)) with two 3x3 convolutions in the branch (section 3.3, option B, and Fig. 5 left).

    (B, in_channels, H, W) -> (B, channels, H/stride, W/stride).
    """

    def __init__(self, in_channels: int, channels: int, stride: int) -> None:
        super().__init__()
        self.branch = nn.Sequential(*layers.conv_bn_relu(in_channels, channels, 3, stride), *layers.conv_bn(channels, channels, 3))
        same_shape = stride == 1 and in_channels == channels
        self.shortcut = nn.Identity() if same_shape else layers.conv_bn(in_channels, channels, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.relu(self.shortcut(x) + self.branch(x), inplace=True)


def resnet18(classes: int = 10, width: float = 1.0, stem: str = "cifar") -> Model:
    """ResNet-18 (Table 1) as 10 blocks: the stem, eight residual blocks, the head.

    Input (B, 3, H, W), output logits (B, ``classes``). ``width`` scales all channel counts (64, 128, 256, 512 at 1).
    ``stem`` is ``imagenet`` (7x7 at stride 2, then 3x3 max pooling at stride 2) or ``cifar`` (3x3 at stride 1, for
    images of 32x32 pixels). Raises :class:`petra.errors.ConfigError` for arguments out of range.
    """
    return _resnet("resnet18", (2, 2, 2, 2), classes, width, stem)


def _resnet(name: str, repeats: Sequence[int], classes: int, width: float, stem: str) -> Model:
    channels = layers.checked_channels(classes, width, stem)
    rows = list(layers.residuals(repeats, channels))
    return Model(
        name,
        (
            BlockSpec("stem", partial(layers.stem, stem, channels)),
            *(BlockSpec(row.name, partial(BasicBlock, row.in_channels, row.channels, row.stride)) for row in rows),
            BlockSpec("head", partial(layers.Head, rows[-1].channels, classes)),
        ),
    )
