"""ResNeXt (Xie et al. 2017, "Aggregated residual transformations for deep neural networks")."""

from __future__ import annotations

from functools import partial

from torch import nn

from petra.errors import Count, Positive, alternatives, require
from petra.inplace_abn.wide_resnet import BlockSizes, IdentityBlock
from petra.model import Model
from petra.models import layers
from petra.models.resnet import ResidualBlock


def resnext101(
    classes: int = 10,
    width: Positive = 1.0,
    stem: str = "auto",
    cardinality: Count = 32,
    base_width: Count = 4,
    norm: str = "batchnorm",
    activation: str | None = None,
) -> Model:
    """Build a ResNeXt-101: 35 blocks. It is a ResNet-101 with wider, grouped 3x3 convolutions (Table 1 and Fig. 3c).

    The defaults give the paper's 32x4d, with 44.2 million parameters for 1000 classes.

    Args:
        classes, stem, norm, activation: As for :func:`petra.models.resnet18`.
        width: Factor of the channels of blocks and groups.
        cardinality: Number of groups.
        base_width: Channels per group in the first layer.

    Raises:
        ConfigError: If an argument is out of range.
    """
    return layers.network("resnext101", resnext_body(101, width, stem, cardinality, base_width, norm, activation), classes)


def resnext152(
    classes: int = 10,
    width: Positive = 1.0,
    stem: str = "auto",
    cardinality: Count = 32,
    base_width: Count = 4,
    norm: str = "batchnorm",
    activation: str | None = None,
) -> Model:
    """Build a ResNeXt-152: 52 blocks. Arguments as for :func:`resnext101`."""
    return layers.network("resnext152", resnext_body(152, width, stem, cardinality, base_width, norm, activation), classes)


def resnext_preact(
    classes: int = 10,
    depth: int = 101,
    width: Positive = 1.0,
    stem: str = "auto",
    norm: str = "batchnorm",
    activation: str | None = None,
) -> Model:
    """Build the ResNeXt of Rota Bulò et al. 2018's code: pre-activation, 64 groups of 2 channels, a stem of three 3x3 convolutions.

    It has 42.9 million parameters for 1000 classes with 101 layers, and 58.2 million with 152.

    Args:
        classes, stem, norm, activation: As for :func:`petra.models.resnet18`.
        depth: Number of layers, 101 or 152.
        width: Factor of the channels of blocks, and of the number of groups.

    Raises:
        ConfigError: If an argument is out of range.
    """
    require(depth in (101, 152), "model.depth", "101 or 152", depth)
    require(stem in layers.STEMS, "model.stem", alternatives(layers.STEMS), stem)
    *channels, groups = layers.scaled((*layers.CHANNELS, 64), width)
    style = layers.Style.chosen(norm, activation)
    rows = [
        BlockSizes(name, (a, 2 * hidden, 2 * hidden, b), stride, groups=groups, pools=False)
        for name, a, hidden, b, stride, *_ in layers.residuals(layers.DEPTHS[depth][0], channels, expansion=4)
    ]
    body = layers.Body(partial(_stem, stem, channels[0], style), rows, partial(IdentityBlock, style), 1, style, preactivation=True)
    return layers.network(f"resnext{depth}_preact", body, classes)


def _stem(kind: str, channels: int, style: layers.Style) -> nn.Sequential:
    first = layers.conv_norm(3, channels, 3, 2 if kind == "imagenet" else 1, style=style)
    second = layers.conv_norm(channels, channels, 3, style=style)
    pool = nn.MaxPool2d(3, stride=2, padding=1) if kind == "imagenet" else nn.Identity()
    return nn.Sequential(*first, *second, layers.conv(channels, channels, 3), pool)


def resnext_body(
    depth: int, width: float, stem: str, cardinality: int, base_width: int, norm: str, activation: str | None
) -> layers.Body:
    """Build a ResNeXt of 101 or 152 layers without its head. Other arguments and errors as for :func:`resnext101`."""
    require(cardinality >= 1, "model.cardinality", "an integer >= 1", cardinality)
    require(base_width >= 1, "model.base_width", "an integer >= 1", base_width)
    *channels, group = layers.scaled((*layers.CHANNELS, base_width), width)
    bottleneck = cardinality > 1 or group != 4 * channels[0]  # blocks as wide inside as outside would be basic ones
    require(bottleneck, "model.base_width", f"another one than {base_width} with model.cardinality=1", base_width)
    rows = [
        row._replace(hidden=cardinality * group * row.hidden // channels[0], groups=cardinality)
        for row in layers.residuals(layers.DEPTHS[depth][0], channels, expansion=4)
    ]
    style = layers.Style.chosen(norm, activation)
    return layers.Body(layers.stem_builder(stem, rows[0].in_channels, style), rows, partial(ResidualBlock, style), 1, style)
