"""ResNeXt (Xie et al. 2017, "Aggregated residual transformations for deep neural networks")."""

from __future__ import annotations

from collections.abc import Sequence

from petra.errors import Count, Positive, require
from petra.model import Model
from petra.models import layers
from petra.models.resnet import residual_body


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
    body = resnext_body("resnext101", layers.DEPTHS[101][0], width, stem, cardinality, base_width, norm, activation)
    return layers.network(body, classes)


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
    body = resnext_body("resnext152", layers.DEPTHS[152][0], width, stem, cardinality, base_width, norm, activation)
    return layers.network(body, classes)


def resnext_body(
    name: str,
    repeats: Sequence[int],
    width: float,
    stem: str,
    cardinality: int,
    base_width: int,
    norm: str,
    activation: str | None,
) -> layers.Body:
    """Build a ResNeXt without its head.

    Args:
        name: Name of the model.
        repeats: Number of residual blocks in each of the four groups.
        width, stem, cardinality, base_width, norm, activation: As for :func:`resnext101`.

    Raises:
        ConfigError: If an argument is out of range.
    """
    require(cardinality >= 1, "model.cardinality", "an integer >= 1", cardinality)
    require(base_width >= 1, "model.base_width", "an integer >= 1", base_width)
    *channels, group = layers.scaled((64, 128, 256, 512, base_width), width)
    rows = [
        row._replace(hidden=cardinality * group * row.hidden // channels[0], groups=cardinality)
        for row in layers.residuals(repeats, channels, expansion=4)
    ]
    return residual_body(name, rows, stem, layers.Style.chosen(norm, activation))
