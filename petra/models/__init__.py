"""Networks as sequences of blocks, for a partition into stages."""

from collections.abc import Callable

from petra.model import Model
from petra.models.irevnet import irevnet163, irevnet301
from petra.models.language import gpt, revgpt
from petra.models.preactivation import (
    resnet32,
    resnet101_preact,
    resnet110,
    resnet164,
    revnet38,
    revnet104,
    revnet110,
    revnet164,
    revnet602,
)
from petra.models.resnet import resnet18, resnet34, resnet50, resnet101
from petra.models.resnext import resnext101, resnext152
from petra.models.revnet import revnet18, revnet34, revnet50, revnet101
from petra.models.segmentation import deeplabv3
from petra.models.vision_transformer import revvit
from petra.models.wide_resnet import wide_resnet38

_RESNETS = (resnet18, resnet34, resnet50, resnet101, resnet32, resnet110, resnet164, resnet101_preact)
_WIDER = (resnext101, resnext152, wide_resnet38)
_REVNETS = (revnet18, revnet34, revnet50, revnet101, revnet38, revnet110, revnet164, revnet104, revnet602)

MODELS: dict[str, Callable[..., Model]] = {
    build.__name__: build for build in (*_RESNETS, *_WIDER, *_REVNETS, irevnet163, irevnet301, deeplabv3, gpt, revgpt, revvit)
}
"""Builders by name.

Every builder takes ``classes``. Builders that depend on the side of the images or the context length take it as ``size``. All
other arguments are options, which the configuration reads from the builders' signatures.
"""

TOKEN_MODELS = ("gpt", "revgpt")
"""Names of the models that take tokens. All others take images."""
SEGMENTATION_MODELS = ("deeplabv3",)
"""Names of the models that classify each pixel of an image."""

__all__ = [
    "MODELS",
    "SEGMENTATION_MODELS",
    "TOKEN_MODELS",
    "deeplabv3",
    "gpt",
    "irevnet163",
    "irevnet301",
    "resnet18",
    "resnet32",
    "resnet34",
    "resnet50",
    "resnet101",
    "resnet101_preact",
    "resnet110",
    "resnet164",
    "resnext101",
    "resnext152",
    "revgpt",
    "revnet18",
    "revnet34",
    "revnet38",
    "revnet50",
    "revnet101",
    "revnet104",
    "revnet110",
    "revnet164",
    "revnet602",
    "revvit",
    "wide_resnet38",
]
