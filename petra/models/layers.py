"""Parts of residual networks: convolutions, normalisation, stems, heads, and the table of residual blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import gcd
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from petra.errors import alternatives, invalid, require
from petra.model import BlockSpec, Model

STEMS = ("auto", "cifar", "imagenet")
DEPTHS = {18: ((2, 2, 2, 2), 1), 34: ((3, 4, 6, 3), 1), 50: ((3, 4, 6, 3), 4), 101: ((3, 4, 23, 3), 4), 152: ((3, 8, 36, 3), 4)}
"""Blocks of each of the four groups, and expansion of a block, by depth (He et al. 2015, Table 1)."""
CHANNELS = (64, 128, 256, 512)
"""Channels of the 3x3 convolutions in each of the four groups at width 1."""
PARTITIONS = ("channels", "rows", "columns", "checkerboard")
"""How the units of a layer are divided into two streams (Gomez et al. 2017, section 3.1, footnote 2; Dinh et al. 2017)."""
LEAK = 0.01
"""Slope of ``leaky_relu`` for negative inputs."""
NARROW = 16
"""Number of input channels from which oneDNN's gradient of strided 1x1 convolutions is correct in every measured case."""


class StridedPointwise(nn.Conv2d):
    """A 1x1 convolution with a stride, which avoids a memory error of oneDNN.

    With few input channels in channels-last format on the CPU, the gradient of the weight can crash, hang or be wrong (oneDNN issue
    6035; torch 2.13). In this case, the layer drops the pixels that the stride skips first, and then convolves with stride 1. The
    values are the same; wide layers and other formats run as in :class:`torch.nn.Conv2d`.
    """

    def forward(self, x: Tensor) -> Tensor:
        dense = x.is_contiguous() and self.in_channels > 1  # with one channel, both formats have the same strides
        if self.in_channels >= NARROW or dense or x.device.type != "cpu":
            return super().forward(x)
        rows, columns = self.stride
        return F.conv2d(x[..., ::rows, ::columns], self.weight, self.bias)


def conv(in_channels: int, out_channels: int, kernel: int, stride: int = 1, groups: int = 1, dilation: int = 1) -> nn.Conv2d:
    """Return a convolution without bias whose output has the size of its input at stride 1.

    Weights are normal with variance 2 / fan_out (He et al. 2015, "Delving deep into rectifiers", section 2.2).
    """
    kind = StridedPointwise if (kernel, groups) == (1, 1) and stride > 1 else nn.Conv2d
    padding = dilation * (kernel // 2)
    layer = kind(in_channels, out_channels, kernel, stride, padding, dilation, groups, bias=False)
    nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
    return layer


class Norm(NamedTuple):
    """A kind of normalisation.

    Attributes:
        activations: Activations that may follow it. The first is the default.
        build: Function that returns the modules. It takes the number of channels; the activation, or None for the normalisation
            alone; and whether the input may be overwritten. With every kind of normalisation, modules at the same place have the
            same parameters.
    """

    activations: tuple[str, ...]
    build: Callable[[int, str | None, bool], list[nn.Module]]


def _batchnorm(channels: int, activation: str | None, overwrite: bool) -> list[nn.Module]:
    kinds = {"relu": nn.ReLU(inplace=True), "leaky_relu": nn.LeakyReLU(LEAK, inplace=True)}
    return [nn.BatchNorm2d(channels), *([] if activation is None else [kinds[activation]])]


NORMS = {"batchnorm": Norm(("relu", "leaky_relu"), _batchnorm)}
"""Normalisations by name. :mod:`petra.inplace_abn` adds its own when it is imported."""


class Style(NamedTuple):
    """Normalisation and activation of a network."""

    norm: Norm = NORMS["batchnorm"]
    activation: str = "relu"

    @classmethod
    def chosen(cls, norm: str, activation: str | None) -> Style:
        """Return the style for the options of a model builder. ``activation`` None selects the default of ``norm``.

        Raises:
            ConfigError: If a name is unknown, or the activation may not follow the normalisation.
        """
        require(norm in NORMS, "model.norm", alternatives(NORMS), norm)
        kind = NORMS[norm]
        chosen = kind.activations[0] if activation is None else activation
        require(chosen in kind.activations, "model.activation", f"{alternatives(kind.activations)} with model.norm={norm}", chosen)
        return cls(kind, chosen)

    def activate_(self, x: Tensor) -> Tensor:
        """Apply the activation in place and return ``x``."""
        return F.relu_(x) if self.activation == "relu" else F.leaky_relu_(x, LEAK)


STANDARD = Style()


def norm_act(channels: int, style: Style = STANDARD, *, activate: bool = True, overwrite: bool = True) -> list[nn.Module]:
    """Return the normalisation, and the activation if ``activate`` is set.

    Args:
        channels: Number of channels.
        style: Kinds of normalisation and activation.
        activate: Whether an activation follows.
        overwrite: Whether the normalisation may overwrite the input. Set False if another operation needs the input.
    """
    return style.norm.build(channels, style.activation if activate else None, overwrite)


def conv_norm(
    in_channels: int,
    out_channels: int,
    kernel: int,
    stride: int = 1,
    groups: int = 1,
    dilation: int = 1,
    *,
    style: Style = STANDARD,
    activate: bool = True,
) -> nn.Sequential:
    """Return convolution, normalisation, and the activation if ``activate`` is set."""
    norm = norm_act(out_channels, style, activate=activate)
    return nn.Sequential(conv(in_channels, out_channels, kernel, stride, groups, dilation), *norm)


def stem(kind: str, channels: int, style: Style = STANDARD) -> nn.Sequential:
    """Return a stem for images (B, 3, H, W).

    Its output is (B, channels, H, W) for ``cifar`` and (B, channels, H/4, W/4) for ``imagenet``.
    """
    if kind != "imagenet":
        return conv_norm(3, channels, 3, style=style)
    return nn.Sequential(*conv_norm(3, channels, 7, stride=2, style=style), nn.MaxPool2d(3, stride=2, padding=1))


class PoolAndPad(nn.Module):
    """Shortcut without parameters: average pooling, then padding with zero channels, half of them before and half after.

    Maps (B, in_channels, H, W) to (B, channels, H/stride, W/stride).
    """

    def __init__(self, row: Residual) -> None:
        super().__init__()
        self.pool = nn.AvgPool2d(row.stride)
        self.before = (row.channels - row.in_channels) // 2
        self.after = row.channels - row.in_channels - self.before

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.pad(self.pool(x), (0, 0, 0, 0, self.before, self.after))


def partitioned(x: Tensor, partition: str) -> tuple[Tensor, Tensor]:
    """Divide the units of x (B, C, H, W) into two halves.

    Args:
        partition: ``channels``: the first and the last channels, (B, C/2, H, W) each. ``rows``: even and odd rows, (B, C, H/2, W).
            ``columns``: even and odd columns, (B, C, H, W/2). ``checkerboard``: positions whose row and column have an even and an
            odd sum, (B, C, H, W/2), each in its row.
    """
    if partition == "channels":
        x1, x2 = x.chunk(2, dim=1)
    elif partition == "rows":
        x1, x2 = x[:, :, 0::2], x[:, :, 1::2]
    else:
        x1, x2 = x[..., 0::2], x[..., 1::2]
    if partition == "checkerboard":
        even = (torch.arange(x.shape[2], device=x.device) % 2 == 0).view(-1, 1)
        x1, x2 = torch.where(even, x1, x2), torch.where(even, x2, x1)
    return x1, x2


class PairStem(nn.Module):
    """Stem whose output is divided into the streams (x1, x2), see :func:`partitioned`.

    Each stream has ``channels`` channels, so every partition has the same residual functions. With ``channels``, the stem has twice
    as many; otherwise the streams have half as many positions.
    """

    def __init__(self, kind: str, channels: int, style: Style = STANDARD, partition: str = "channels") -> None:
        super().__init__()
        self.layers = stem(kind, channels * (2 if partition == "channels" else 1), style)
        self.partition = partition

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x1, x2 = partitioned(self.layers(x), self.partition)
        # Copies are dense, like streams received in a message. The next block thus gets the same memory layout in both cases.
        return x1.clone(), x2.clone()


def stem_builder(kind: str, channels: int, style: Style = STANDARD, partition: str | None = None) -> Callable[[], nn.Module]:
    """Return the builder of a stem of one stream, or of two into which ``partition`` divides the units.

    Raises:
        ConfigError: If the kind of the stem or the partition is unknown.
    """
    require(kind in STEMS, "model.stem", alternatives(STEMS), kind)
    if partition is None:
        return partial(stem, kind, channels, style)
    require(partition in PARTITIONS, "model.partition", alternatives(PARTITIONS), partition)
    return partial(PairStem, kind, channels, style, partition)


class ClassifierHead(nn.Module):
    """Global average pooling of every stream (B, C, H, W), and a linear layer from all averages to logits (B, classes)."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.linear = nn.Linear(features, classes)

    def forward(self, *streams: Tensor) -> Tensor:
        logits: Tensor = self.linear(torch.cat([x.mean((2, 3)) for x in streams], dim=1))
        return logits


class ActivatedHead(nn.Module):
    """Normalisation and activation of the streams, followed by :class:`ClassifierHead`, for networks of pre-activation blocks."""

    def __init__(self, features: int, classes: int, style: Style = STANDARD) -> None:
        super().__init__()
        self.activation = nn.Sequential(*norm_act(features, style))
        self.head = ClassifierHead(features, classes)

    def forward(self, *streams: Tensor) -> Tensor:
        logits: Tensor = self.head(self.activation(torch.cat(streams, dim=1)))
        return logits


class Residual(NamedTuple):
    """Sizes of one residual block.

    Attributes:
        name: Name of the block.
        in_channels: Channels of the input.
        hidden: Channels of the 3x3 convolutions.
        channels: Channels of the output.
        stride: Factor by which the block downsamples the image.
        groups: Groups of a bottleneck's 3x3 convolution.
        dilation: Dilation of the 3x3 convolutions.
    """

    name: str
    in_channels: int
    hidden: int
    channels: int
    stride: int
    groups: int = 1
    dilation: int = 1

    @property
    def bottleneck(self) -> bool:
        """Whether the branch has 1x1, 3x3 and 1x1 convolutions instead of two 3x3 convolutions (He et al. 2015, Fig. 5)."""
        return self.hidden != self.channels or self.groups > 1

    @property
    def resizes(self) -> bool:
        """Whether the output's shape differs from the input's."""
        return self.stride != 1 or self.in_channels != self.channels

    def convolutions(self) -> list[tuple[int, int, int, int, int, int]]:
        """Return input channels, output channels, kernel size, stride, groups and dilation of each convolution of the branch."""
        if self.bottleneck:
            return [
                (self.in_channels, self.hidden, 1, 1, 1, 1),
                (self.hidden, self.hidden, 3, self.stride, self.groups, self.dilation),
                (self.hidden, self.channels, 1, 1, 1, 1),
            ]
        first = (self.in_channels, self.channels, 3, self.stride, 1, self.dilation)
        return [first, (self.channels, self.channels, 3, 1, 1, self.dilation)]


def residuals(repeats: Sequence[int], hidden: Sequence[int], expansion: int) -> list[Residual]:
    """Return the residual blocks of a network. The first block of each layer after the first has stride 2.

    Args:
        repeats: Number of blocks of each layer.
        hidden: Channels of the 3x3 convolutions of each layer. The input of the first block has ``hidden[0]`` channels.
        expansion: Output channels of a block divided by ``hidden``: 1 for basic blocks, 4 for bottlenecks.
    """
    rows, in_channels = [], hidden[0]
    for layer, (repeat, channels) in enumerate(zip(repeats, hidden, strict=True)):
        for i in range(repeat):
            stride = 2 if layer and not i else 1
            rows.append(Residual(f"layer{layer + 1}_{i}", in_channels, channels, expansion * channels, stride))
            in_channels = expansion * channels
    return rows


class Body(NamedTuple):
    """A residual network without its head: a stem and one block per row.

    Attributes:
        stem: Builder of the stem.
        rows: Sizes of the residual blocks, with a name and the output's channels (of each stream).
        residual: Builder of a residual block from its row.
        streams: Number of streams, 1 or 2.
        style: Normalisation and activation.
        preactivation: Whether the head must start with normalisation and activation.
    """

    stem: Callable[[], nn.Module]
    rows: Sequence[Any]
    residual: Callable[[Any], nn.Module]
    streams: int
    style: Style = STANDARD
    preactivation: bool = False

    @property
    def features(self) -> int:
        """Total channels of the output streams."""
        return self.streams * int(self.rows[-1].channels)

    def blocks(self) -> tuple[BlockSpec, ...]:
        """Return the stem and the residual blocks."""
        return BlockSpec("stem", self.stem), *(BlockSpec(row.name, partial(self.residual, row)) for row in self.rows)


def network(name: str, body: Body, classes: int) -> Model:
    """Return a classification network: a body, and a head that reads all streams.

    Raises:
        ConfigError: If ``classes`` is not an integer >= 1.
    """
    require(classes >= 1, "model.classes", "an integer >= 1", classes)
    head: Callable[[int, int], nn.Module] = partial(ActivatedHead, style=body.style) if body.preactivation else ClassifierHead
    return Model(name, (*body.blocks(), BlockSpec("head", partial(head, body.features, classes))))


def scaled(channels: Sequence[int], width: float) -> list[int]:
    """Return channel counts multiplied by ``width``.

    Raises:
        ConfigError: If a result is not an integer >= 1.
    """
    results = [c * float(width) for c in channels]
    for c in results:
        if not (c >= 1 and c.is_integer()):
            expected = f"a positive multiple of 1/{gcd(*channels)}"
            raise invalid("model.width", expected, f"{width}, which makes {c:g} channels in a layer")
    return [int(c) for c in results]
