"""ResNeXt (Xie et al. 2017, "Aggregated residual transformations for deep neural networks")."""

from __future__ import annotations

from functools import partial

from petra.errors import Count, Positive, require
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


def resnext_body(
    depth: int, width: float, stem: str, cardinality: int, base_width: int, norm: str, activation: str | None
) -> layers.Body:
    """Build a ResNeXt of 101 or 152 layers without its head. Other arguments and errors as for :func:`resnext101`."""
    require(cardinality >= 1, "model.cardinality", "an integer >= 1", cardinality)
    require(base_width >= 1, "model.base_width", "an integer >= 1", base_width)
    *channels, group = layers.scaled((*layers.CHANNELS, base_width), width)
    rows = [
        row._replace(hidden=cardinality * group * row.hidden // channels[0], groups=cardinality)
        for row in layers.residuals(layers.DEPTHS[depth][0], channels, expansion=4)
    ]
    style = layers.Style.chosen(norm, activation)
    return layers.Body(layers.stem_builder(stem, rows[0].in_channels, style), rows, partial(ResidualBlock, style), 1, style)
