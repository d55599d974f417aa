"""ResNeXt of Xie et al. 2017, "Aggregated residual transformations for deep neural networks"."""

from __future__ import annotations

from collections.abc import Sequence

from petra.errors import ConfigError
from petra.model import Model
from petra.models import layers
from petra.models.resnet import residual_network


def resnext101(
    classes: int = 10,
    width: float = 1.0,
    stem: str = "cifar",
    cardinality: int = 32,
    base_width: int = 4,
    norm: str = "batchnorm",
    activation: str | None = None,
) -> Model:
    """ResNeXt-101 as 35 blocks: a ResNet-101 whose 3x3 convolutions are wider and in groups (Table 1 and Fig. 3c).

    ``cardinality`` is the number of groups, ``base_width`` the channels of a group in the first layer: 32 and 4 make the paper's
    32x4d, 44.2 million parameters for 1000 classes. ``width`` scales the channels of the blocks and of the groups; the rest is
    :func:`petra.models.resnet18`'s.
    """
    return _resnext("resnext101", (3, 4, 23, 3), classes, width, stem, cardinality, base_width, norm, activation)


def resnext152(
    classes: int = 10,
    width: float = 1.0,
    stem: str = "cifar",
    cardinality: int = 32,
    base_width: int = 4,
    norm: str = "batchnorm",
    activation: str | None = None,
) -> Model:
    """ResNeXt-152 as 52 blocks; otherwise as :func:`resnext101`."""
    return _resnext("resnext152", (3, 8, 36, 3), classes, width, stem, cardinality, base_width, norm, activation)


def _resnext(
    name: str,
    repeats: Sequence[int],
    classes: int,
    width: float,
    stem: str,
    cardinality: int,
    base_width: int,
    norm: str,
    activation: str | None,
) -> Model:
    for key, found in (("cardinality", cardinality), ("base_width", base_width)):
        if found < 1:
            raise ConfigError(f"model.{key}: found {found}, accepted are whole numbers from 1 on")
    *channels, group = layers.scaled((64, 128, 256, 512, base_width), width)
    rows = [
        row._replace(hidden=cardinality * group * row.hidden // channels[0], groups=cardinality)
        for row in layers.residuals(repeats, channels[0], channels, expansion=4)
    ]
    return residual_network(name, rows, classes, stem, layers.Style.chosen(norm, activation))
