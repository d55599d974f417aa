"""Pieces that the residual networks share: initialised convolutions, stems, the head, the table of residual blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from petra.errors import ConfigError
from petra.model import BlockSpec, Model

STEMS = ("cifar", "imagenet")


def conv(in_channels: int, out_channels: int, kernel: int, stride: int = 1) -> nn.Conv2d:
    """A bias-free convolution that keeps the image size at stride 1.

    Weights are normal with variance 2 / fan_out (He et al. 2015, "Delving deep into rectifiers", section 2.2).
    """
    layer = nn.Conv2d(in_channels, out_channels, kernel, stride, padding=kernel // 2, bias=False)
    nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
    return layer


def conv_bn(in_channels: int, out_channels: int, kernel: int, stride: int = 1) -> nn.Sequential:
    """Convolution and batch normalisation."""
    return nn.Sequential(conv(in_channels, out_channels, kernel, stride), nn.BatchNorm2d(out_channels))


def conv_bn_relu(in_channels: int, out_channels: int, kernel: int, stride: int = 1) -> nn.Sequential:
    """Convolution, batch normalisation and ReLU; in place, on the normalisation's own result."""
    return nn.Sequential(*conv_bn(in_channels, out_channels, kernel, stride), nn.ReLU(inplace=True))


def stem(kind: str, channels: int) -> nn.Sequential:
    """From an image (B, 3, H, W) to (B, channels, H, W) for ``cifar`` or (B, channels, H/4, W/4) for ``imagenet``."""
    if kind == "cifar":
        return conv_bn_relu(3, channels, 3)
    return nn.Sequential(*conv_bn_relu(3, channels, 7, stride=2), nn.MaxPool2d(3, stride=2, padding=1))


class Head(nn.Module):
    """Averages every stream (B, C, H, W) over its positions and maps all the averages to (B, classes)."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.linear = nn.Linear(features, classes)

    def forward(self, *streams: Tensor) -> Tensor:
        logits: Tensor = self.linear(torch.cat([x.mean((2, 3)) for x in streams], dim=1))
        return logits


class Residual(NamedTuple):
    """One row of a network's table of residual blocks: the sizes of its branch of convolutions."""

    name: str
    in_channels: int
    hidden: int
    channels: int
    stride: int

    @property
    def bottleneck(self) -> bool:
        """Whether the branch is 1x1, 3x3, 1x1 instead of 3x3, 3x3 (He et al. 2015, Fig. 5)."""
        return self.hidden != self.channels

    @property
    def resizes(self) -> bool:
        """Whether the output's shape differs from the input's."""
        return self.stride != 1 or self.in_channels != self.channels

    def convolutions(self) -> list[tuple[int, int, int, int]]:
        """Channels in and out, kernel size and stride of each convolution of the branch."""
        if self.bottleneck:
            return [
                (self.in_channels, self.hidden, 1, 1),
                (self.hidden, self.hidden, 3, self.stride),
                (self.hidden, self.channels, 1, 1),
            ]
        return [(self.in_channels, self.channels, 3, self.stride), (self.channels, self.channels, 3, 1)]


def residuals(repeats: Sequence[int], channels: int, expansion: int) -> list[Residual]:
    """The residual blocks of a network: channels double, and the image is halved, at each layer after the first.

    Args:
        expansion: channels of a block over those of its 3x3 convolutions: 1 for basic blocks, 4 for bottlenecks.
    """
    rows = []
    in_channels = channels
    for layer, repeat in enumerate(repeats):
        hidden = channels << layer
        for i in range(repeat):
            stride = 2 if layer and not i else 1
            rows.append(Residual(f"layer{layer + 1}_{i}", in_channels, hidden, expansion * hidden, stride))
            in_channels = expansion * hidden
    return rows


def network(
    name: str,
    stem: Callable[[], nn.Module],
    rows: Sequence[Residual],
    residual: Callable[[Residual], nn.Module],
    *,
    streams: int,
    classes: int,
) -> Model:
    """A stem, a block for each row, and a head that reads all the streams."""
    return Model(
        name,
        (
            BlockSpec("stem", stem),
            *(BlockSpec(row.name, partial(residual, row)) for row in rows),
            BlockSpec("head", partial(Head, streams * rows[-1].channels, classes)),
        ),
    )


def checked_channels(classes: int, width: float, stem: str) -> int:
    """Channels of the first layer, 64 * width; raises :class:`ConfigError` for arguments that make no network."""
    if classes < 1:
        raise ConfigError(f"model.classes: found {classes}, accepted are whole numbers from 1 on")
    if stem not in STEMS:
        raise ConfigError(f"model.stem: found {stem!r}, accepted are {', '.join(STEMS)}")
    channels = 64 * float(width)
    if not (channels >= 1 and channels.is_integer()):
        raise ConfigError(
            f"model.width: found {width}, which makes {channels:g} channels in the first layer; "
            "accepted are multiples of 1/64 from 1/64 on (0.25, 0.5, 1, 2, ...)"
        )
    return int(channels)
