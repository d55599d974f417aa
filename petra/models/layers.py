"""Pieces that the residual networks share: initialised convolutions, normalisation, stems, heads, the table of residual blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import gcd
from typing import NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from petra.errors import ConfigError
from petra.model import BlockSpec, Model
from petra.nn import InPlaceABN

STEMS = ("cifar", "imagenet")
NORMS = {"batchnorm": ("relu", "leaky_relu"), "inplace_abn": ("leaky_relu",)}
"""Normalisations, each with the activations that may follow it; without a choice the first does."""
LEAK = 0.01
"""Slope of leaky_relu below zero."""


def conv(in_channels: int, out_channels: int, kernel: int, stride: int = 1, groups: int = 1) -> nn.Conv2d:
    """A bias-free convolution that keeps the image size at stride 1.

    Weights are normal with variance 2 / fan_out (He et al. 2015, "Delving deep into rectifiers", section 2.2).
    """
    layer = nn.Conv2d(in_channels, out_channels, kernel, stride, padding=kernel // 2, groups=groups, bias=False)
    nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
    return layer


class Style(NamedTuple):
    """What stands between the convolutions of a network."""

    norm: str = "batchnorm"
    activation: str = "relu"

    @classmethod
    def chosen(cls, norm: str, activation: str | None) -> Style:
        """Raises :class:`ConfigError` for unknown names, and for an activation that InPlace-ABN can't undo."""
        accepted = NORMS[choice("norm", norm, tuple(NORMS))]
        return cls(
            norm, accepted[0] if activation is None else choice("activation", activation, accepted, f" for model.norm={norm}")
        )

    def activate_(self, x: Tensor) -> Tensor:
        """The activation, in place."""
        return F.relu_(x) if self.activation == "relu" else F.leaky_relu_(x, LEAK)


STANDARD = Style()


def norm_act(channels: int, style: Style = STANDARD, *, activate: bool = True, overwrite: bool = True) -> list[nn.Module]:
    """Normalisation, then the activation if ``activate``. All networks make theirs here.

    Args:
        overwrite: nobody else needs the input, so that InPlace-ABN may write over it.
    """
    if style.norm == "inplace_abn":
        norm = InPlaceABN(channels, style.activation if activate else "identity", slope=LEAK, overwrite=overwrite)
        # In the place of the activation, so that the state has the same keys whatever the normalisation.
        return [norm, *([nn.Identity()] if activate else [])]
    activation = nn.ReLU(inplace=True) if style.activation == "relu" else nn.LeakyReLU(LEAK, inplace=True)
    return [nn.BatchNorm2d(channels), *([activation] if activate else [])]


def conv_norm(
    in_channels: int,
    out_channels: int,
    kernel: int,
    stride: int = 1,
    groups: int = 1,
    *,
    style: Style = STANDARD,
    activate: bool = True,
) -> nn.Sequential:
    """Convolution, normalisation and, if ``activate``, the activation."""
    norm = norm_act(out_channels, style, activate=activate)
    return nn.Sequential(conv(in_channels, out_channels, kernel, stride, groups), *norm)


def stem(kind: str, channels: int, style: Style = STANDARD) -> nn.Sequential:
    """From an image (B, 3, H, W) to (B, channels, H, W) for ``cifar`` or (B, channels, H/4, W/4) for ``imagenet``."""
    if kind == "cifar":
        return conv_norm(3, channels, 3, style=style)
    return nn.Sequential(*conv_norm(3, channels, 7, stride=2, style=style), nn.MaxPool2d(3, stride=2, padding=1))


class PairStem(nn.Module):
    """The stem at twice the channels, cut into the streams (x1, x2) of ``channels`` each."""

    def __init__(self, kind: str, channels: int, style: Style = STANDARD) -> None:
        super().__init__()
        self.layers = stem(kind, 2 * channels, style)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x1, x2 = self.layers(x).chunk(2, dim=1)
        # Dense copies: the next block then sees the same memory layout here as when the streams arrive in a message.
        return x1.clone(), x2.clone()


class Head(nn.Module):
    """Averages every stream (B, C, H, W) over its positions and maps all the averages to (B, classes)."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.linear = nn.Linear(features, classes)

    def forward(self, *streams: Tensor) -> Tensor:
        logits: Tensor = self.linear(torch.cat([x.mean((2, 3)) for x in streams], dim=1))
        return logits


class ActivatedHead(nn.Module):
    """Normalises and rectifies the streams before :class:`Head`: the end of a network of pre-activation blocks."""

    def __init__(self, features: int, classes: int, style: Style = STANDARD) -> None:
        super().__init__()
        self.activation = nn.Sequential(*norm_act(features, style))
        self.head = Head(features, classes)

    def forward(self, *streams: Tensor) -> Tensor:
        logits: Tensor = self.head(self.activation(torch.cat(streams, dim=1)))
        return logits


class Residual(NamedTuple):
    """One row of a network's table of residual blocks: the sizes of its branch of convolutions."""

    name: str
    in_channels: int
    hidden: int
    channels: int
    stride: int
    groups: int = 1
    """Of the 3x3 convolution of a bottleneck."""

    @property
    def bottleneck(self) -> bool:
        """Whether the branch is 1x1, 3x3, 1x1 instead of 3x3, 3x3 (He et al. 2015, Fig. 5)."""
        return self.hidden != self.channels or self.groups > 1

    @property
    def resizes(self) -> bool:
        """Whether the output's shape differs from the input's."""
        return self.stride != 1 or self.in_channels != self.channels

    def convolutions(self) -> list[tuple[int, int, int, int, int]]:
        """Channels in and out, kernel size, stride and groups of each convolution of the branch."""
        if self.bottleneck:
            return [
                (self.in_channels, self.hidden, 1, 1, 1),
                (self.hidden, self.hidden, 3, self.stride, self.groups),
                (self.hidden, self.channels, 1, 1, 1),
            ]
        return [(self.in_channels, self.channels, 3, self.stride, 1), (self.channels, self.channels, 3, 1, 1)]


def residuals(repeats: Sequence[int], in_channels: int, hidden: Sequence[int], expansion: int) -> list[Residual]:
    """The residual blocks of a network; the image is halved at the start of each layer after the first.

    Args:
        repeats: blocks of each layer.
        in_channels: of the first block.
        hidden: channels of the 3x3 convolutions of each layer.
        expansion: channels of a block over its hidden ones: 1 for basic blocks, 4 for bottlenecks.
    """
    rows = []
    for layer, (repeat, channels) in enumerate(zip(repeats, hidden, strict=True)):
        for i in range(repeat):
            stride = 2 if layer and not i else 1
            rows.append(Residual(f"layer{layer + 1}_{i}", in_channels, channels, expansion * channels, stride))
            in_channels = expansion * channels
    return rows


class Row(Protocol):
    """One row of a network's table: what the network needs to know of a block."""

    @property
    def name(self) -> str: ...

    @property
    def channels(self) -> int:
        """Of the block's output."""


R = TypeVar("R", bound=Row)


def network(
    name: str,
    stem: Callable[[], nn.Module],
    rows: Sequence[R],
    residual: Callable[[R], nn.Module],
    *,
    streams: int,
    classes: int,
    head: Callable[[int, int], nn.Module] = Head,
) -> Model:
    """A stem, a block for each row, and a head that reads all the streams.

    Args:
        head: from the channels of all the streams and the number of classes to the head.

    Raises:
        ConfigError: no class.
    """
    if classes < 1:
        raise ConfigError(f"model.classes: found {classes}, accepted are whole numbers from 1 on")
    return Model(
        name,
        (
            BlockSpec("stem", stem),
            *(BlockSpec(row.name, partial(residual, row)) for row in rows),
            BlockSpec("head", partial(head, streams * rows[-1].channels, classes)),
        ),
    )


def scaled(channels: Sequence[int], width: float) -> list[int]:
    """Channel counts times ``width``; raises :class:`ConfigError` unless they are whole numbers from 1 on."""
    found = [c * float(width) for c in channels]
    for c in found:
        if not (c >= 1 and c.is_integer()):
            step = gcd(*channels)
            raise ConfigError(
                f"model.width: found {width}, which makes {c:g} channels in a layer; "
                f"accepted are multiples of 1/{step} from 1/{step} on (0.25, 0.5, 1, 2, ...)"
            )
    return [int(c) for c in found]


def choice(key: str, found: str, accepted: Sequence[str], condition: str = "") -> str:
    """``found``, if it is among ``accepted``; raises :class:`ConfigError` otherwise, which names the ``condition``."""
    if found not in accepted:
        raise ConfigError(f"model.{key}: found {found!r}, accepted are {', '.join(accepted)}{condition}")
    return found
