"""Semantic segmentation: DeepLabV3 (Chen et al. 2017) with the head of Rota Bulò et al. 2018, section 4.2."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from petra.errors import Count, Positive, alternatives, require
from petra.inplace_abn.resnext import resnext_body
from petra.inplace_abn.wide_resnet import wide_resnet38_body
from petra.model import BlockSpec, Model
from petra.models import layers
from petra.models.resnet import resnet_body
from petra.models.revnet import revnet_body

OUTPUT_STRIDE = 8
"""Side of the image divided by the side of the body's output."""
BRANCHES = ((1, 1), (3, 12), (3, 24), (3, 36))
"""Kernel size and dilation of the head's parallel convolutions."""
CHANNELS = 256
"""Channels of each branch of the head, and of its output."""
BODIES = {f"{kind}{depth}": depth for kind in ("resnet", "revnet") for depth in (18, 34, 50, 101)}
BODIES |= {"resnext101": 101, "resnext152": 152, "wide_resnet38": 38}
"""Names of the bodies, with their depths."""


class Context(nn.Module):
    """Parallel dilated convolutions and global features, reduced by a 1x1 convolution.

    Maps streams (B, C, H, W) to (B, channels, H, W). The outputs of the branches are concatenated before they are normalised, which
    gives the same numbers as normalising each of them, and stores one tensor less. Global features are normalised over the batch,
    before they get the size of the image: otherwise their running variance would be that of B·H·W values instead of B.

    Args:
        features: Total channels of the streams.
        channels: Channels of each branch and of the output.
        style: Normalisation and activation.
        preactivation: Whether to normalise and activate the streams first.
    """

    def __init__(self, features: int, channels: int, style: layers.Style, *, preactivation: bool) -> None:
        super().__init__()
        self.activation = nn.Sequential(*(layers.norm_act(features, style) if preactivation else []))
        self.branches = nn.ModuleList(layers.conv(features, channels, kernel, dilation=dilation) for kernel, dilation in BRANCHES)
        self.pooled = layers.conv_norm(features, channels, 1, style=style)
        stacked = len(BRANCHES) * channels
        self.norm = nn.Sequential(*layers.norm_act(stacked, style))
        self.reduce = layers.conv_norm(stacked + channels, channels, 1, style=style)

    def forward(self, *streams: Tensor) -> Tensor:
        x = self.activation(torch.cat(streams, dim=1))
        pooled = self.pooled(x.mean((2, 3), keepdim=True))
        stacked = self.norm(torch.cat([branch(x) for branch in self.branches], dim=1))
        # The 1x1 convolution of all of them, without a copy that holds the pooled features at each position.
        convolution, *rest = list(self.reduce)
        weight, own = convolution.get_parameter("weight"), stacked.shape[1]
        y = F.conv2d(stacked, weight[:, :own]) + F.conv2d(pooled, weight[:, own:])
        for layer in rest:
            y = layer(y)
        return y


class PixelClassifier(nn.Module):
    """Scores of the classes at each pixel, interpolated bilinearly to the size of the image.

    Maps (B, C, H, W) to (B, classes, 8H, 8W).
    """

    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        self.scores = nn.Conv2d(channels, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        return F.interpolate(self.scores(x), scale_factor=OUTPUT_STRIDE, mode="bilinear", align_corners=False)


def deeplabv3(
    classes: int = 19,
    body: str = "resnext101",
    width: Positive = 1.0,
    cardinality: Count | None = None,
    base_width: Count | None = None,
    norm: str = "batchnorm",
    activation: str | None = None,
) -> Model:
    """Build a DeepLabV3: the blocks of a body at output stride 8, then ``context`` and ``predict``.

    Where the classification network would downsample below 1/8 of the image, the convolutions of the remaining blocks are dilated
    instead. The parameters of these blocks are those of the classification network, so its weights can initialize them.

    Input: images (B, 3, H, W), H and W multiples of 8. Output: logits (B, ``classes``, H, W).

    Args:
        classes: Number of classes.
        body: Name of the body: a ResNet, RevNet, ResNeXt or WideResNet-38.
        width: Factor of the channels of body and head.
        cardinality, base_width: Groups and channels per group of a ResNeXt, 64 and 4 by default. None for other bodies.
        norm, activation: As for :func:`petra.models.resnet18`.

    Raises:
        ConfigError: If an argument is out of range.
    """
    require(classes >= 1, "model.classes", "an integer >= 1", classes)
    built = dilated(_body(body, width, cardinality, base_width, norm, activation), 1 if body == "wide_resnet38" else 4)
    (channels,) = layers.scaled((CHANNELS,), width)
    context = partial(Context, built.features, channels, built.style, preactivation=built.preactivation)
    head = BlockSpec("context", context), BlockSpec("predict", partial(PixelClassifier, channels, classes))
    return Model(f"deeplabv3_{body}", (*built.blocks(), *head))


def dilated(body: layers.Body, stem_stride: int) -> layers.Body:
    """Return a body whose output stride is :data:`OUTPUT_STRIDE`. Rows that would downsample further dilate instead.

    Args:
        body: A body whose rows have the fields ``stride`` and ``dilation``.
        stem_stride: Factor by which the stem downsamples.
    """
    rows: list[Any] = []
    stride, dilation = stem_stride, 1
    for row in body.rows:
        own = row.stride
        if stride * own > OUTPUT_STRIDE:
            own, dilation = 1, dilation * own
        stride *= own
        rows.append(row._replace(stride=own, dilation=dilation))
    return body._replace(rows=rows)


def _body(
    name: str, width: float, cardinality: int | None, base_width: int | None, norm: str, activation: str | None
) -> layers.Body:
    require(name in BODIES, "model.body", alternatives(BODIES), name)
    if name.startswith("resnext"):
        groups, channels = 64 if cardinality is None else cardinality, 4 if base_width is None else base_width
        return resnext_body(BODIES[name], width, "imagenet", groups, channels, norm, activation)
    for key, value in (("cardinality", cardinality), ("base_width", base_width)):
        require(value is None, f"model.{key}", f"null with model.body={name}", value)
    if name == "wide_resnet38":
        return wide_resnet38_body(width, norm, activation)
    build = revnet_body if name.startswith("revnet") else resnet_body
    return build(BODIES[name], width, "imagenet", norm, activation)
