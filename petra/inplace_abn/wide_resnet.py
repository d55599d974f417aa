"""WideResNet-38 (Wu et al. 2016, "Wider or deeper"), with pooling and without dropout, as trained by Rota Bulò et al. 2018."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import NamedTuple

from torch import Tensor, nn

from petra.errors import Positive
from petra.model import Model
from petra.models import layers

REPEATS = (3, 3, 6, 3, 1, 1)
CHANNELS = ((128, 128), (256, 256), (512, 512), (512, 1024), (512, 1024, 2048), (1024, 2048, 4096))
"""Channels of the convolutions of a block, for each layer. Two convolutions are 3x3; three are 1x1, 3x3 and 1x1."""


class BlockSizes(NamedTuple):
    """Sizes of one residual block.

    Attributes:
        name: Name of the block.
        widths: Channels of the input, then of the output of each convolution.
        stride: Factor by which the block downsamples the image.
        dilation: Dilation of the 3x3 convolutions.
        groups: Groups of the second convolution.
        pools: Whether max pooling at the start downsamples the image, instead of the first convolution.
    """

    name: str
    widths: tuple[int, ...]
    stride: int
    dilation: int = 1
    groups: int = 1
    pools: bool = True

    @property
    def channels(self) -> int:
        """Channels of the output."""
        return self.widths[-1]


class IdentityBlock(nn.Module):
    """Pre-activation residual block x + branch(x) (He et al. 2016, "Identity mappings in deep residual networks").

    Maps (B, C, H, W) to (B, C', H/stride, W/stride). If C' differs from C, a 1x1 convolution of the first activation replaces x.

    Args:
        style: Normalisation and activation.
        sizes: Sizes of the block.
    """

    def __init__(self, style: layers.Style, sizes: BlockSizes) -> None:
        super().__init__()
        kernels = (3, 3) if len(sizes.widths) == 3 else (1, 3, 1)
        stride = 1 if sizes.pools else sizes.stride
        self.pool = nn.MaxPool2d(3, stride=2, padding=1) if sizes.stride != stride else nn.Identity()
        # The normalisation must not overwrite its input, which is also the shortcut.
        self.first = nn.Sequential(*layers.norm_act(sizes.widths[0], style, overwrite=False))
        self.branch = nn.Sequential()
        for i, ((a, b), kernel) in enumerate(zip(pairwise(sizes.widths), kernels, strict=True)):
            convolution = layers.conv(a, b, kernel, 1 if i else stride, sizes.groups if i == 1 else 1, sizes.dilation)
            self.branch.extend([*(layers.norm_act(a, style) if i else []), convolution])
        self.shortcut = layers.conv(sizes.widths[0], sizes.channels, 1, stride) if sizes.widths[0] != sizes.channels else None

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(x)
        h = self.first(x)
        y: Tensor = self.branch(h) + (x if self.shortcut is None else self.shortcut(h))
        return y


def wide_resnet38(classes: int = 10, width: Positive = 1.0, norm: str = "batchnorm", activation: str | None = None) -> Model:
    """Build a WideResNet-38: 19 blocks (3x3 convolution, 17 residual blocks in six layers, head).

    It has 109.2 million parameters for 1000 classes. Each of the first five layers starts by halving the image.

    Input: images (B, 3, H, W) of at least 32x32 pixels. Output: logits (B, ``classes``).

    Args:
        classes, norm, activation: As for :func:`petra.models.resnet18`.
        width: Factor of all channel counts, which are 64 in the first convolution and 128 to 4096 in the layers at 1.

    Raises:
        ConfigError: If an argument is out of range.
    """
    return layers.network("wide_resnet38", wide_resnet38_body(width, norm, activation), classes)


def wide_resnet38_body(width: float, norm: str, activation: str | None) -> layers.Body:
    """Build a WideResNet-38 without its head. Arguments and errors as for :func:`wide_resnet38`."""
    style = layers.Style.chosen(norm, activation)
    channels = iter(layers.scaled([64, *(c for layer in CHANNELS for c in layer)], width))
    in_channels = stem = next(channels)
    rows = []
    for layer, (repeat, branch) in enumerate(zip(REPEATS, CHANNELS, strict=True)):
        inner = tuple(next(channels) for _ in branch)
        for i in range(repeat):
            rows.append(BlockSizes(f"layer{layer + 1}_{i}", (in_channels, *inner), stride=2 if i == 0 and layer < 5 else 1))
            in_channels = inner[-1]
    start, residual = partial(layers.conv, 3, stem, 3), partial(IdentityBlock, style)
    return layers.Body(start, rows, residual, streams=1, style=style, preactivation=True)
