"""WideResNet-38 of Wu et al. 2016, "Wider or deeper", with pooling and without dropout, as Rota Bulò et al. 2018 train it."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import NamedTuple

from torch import Tensor, nn

from petra.model import Model
from petra.models import layers

REPEATS = (3, 3, 6, 3, 1, 1)
CHANNELS = ((128, 128), (256, 256), (512, 512), (512, 1024), (512, 1024, 2048), (1024, 2048, 4096))
"""Of the convolutions of the blocks of each layer: two of 3x3, or 1x1, 3x3, 1x1."""


class Row(NamedTuple):
    """One residual block."""

    name: str
    widths: tuple[int, ...]
    """Channels of the input, then of the result of each convolution."""
    pool: bool
    """Whether the image is halved first."""

    @property
    def channels(self) -> int:
        return self.widths[-1]


class WideBlock(nn.Module):
    """x + branch(x) with normalisation and activation before each convolution (He et al. 2016, "Identity mappings").

    (B, C, H, W) -> (B, C', H, W), or H/2 and W/2 where it pools first. Where C' differs, a 1x1 convolution of the first activation
    takes the place of x.
    """

    def __init__(self, style: layers.Style, row: Row) -> None:
        super().__init__()
        kernels = (3, 3) if len(row.widths) == 3 else (1, 3, 1)
        self.pool = nn.MaxPool2d(3, stride=2, padding=1) if row.pool else nn.Identity()
        # The input is also the shortcut; it belongs to the block before unless it has just been pooled.
        self.first = nn.Sequential(*layers.norm_act(row.widths[0], style, overwrite=False))
        self.branch = nn.Sequential()
        for i, ((a, b), kernel) in enumerate(zip(pairwise(row.widths), kernels, strict=True)):
            self.branch.extend([*(layers.norm_act(a, style) if i else []), layers.conv(a, b, kernel)])
        self.shortcut = layers.conv(row.widths[0], row.channels, 1) if row.widths[0] != row.channels else None

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(x)
        h = self.first(x)
        y: Tensor = self.branch(h) + (x if self.shortcut is None else self.shortcut(h))
        return y


def wide_resnet38(classes: int = 10, width: float = 1.0, norm: str = "batchnorm", activation: str | None = None) -> Model:
    """WideResNet-38 as 19 blocks: a 3x3 convolution, 17 residual blocks in six layers, the head; 109.2 million parameters.

    Input (B, 3, H, W), from 32x32 pixels on, output logits (B, ``classes``). The image is halved before each of the first five
    layers. ``width`` scales all channel counts (64, then 128 to 4096 at 1); the rest is :func:`petra.models.resnet18`'s.
    """
    style = layers.Style.chosen(norm, activation)
    channels = iter(layers.scaled([64, *(c for layer in CHANNELS for c in layer)], width))
    in_channels = stem = next(channels)
    rows = []
    for layer, (repeat, branch) in enumerate(zip(REPEATS, CHANNELS, strict=True)):
        inner = tuple(next(channels) for _ in branch)
        for i in range(repeat):
            rows.append(Row(f"layer{layer + 1}_{i}", (in_channels, *inner), pool=i == 0 and layer < 5))
            in_channels = inner[-1]
    head = partial(layers.ActivatedHead, style=style)
    start, residual = partial(layers.conv, 3, stem, 3), partial(WideBlock, style)
    return layers.network("wide_resnet38", start, rows, residual, streams=1, classes=classes, head=head)
