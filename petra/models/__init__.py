"""Networks as sequences of blocks, for a partition into stages."""

from collections.abc import Callable

from petra.model import Model
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
from petra.models.reversible_layers import RevGPTLayer, RevNetDownsample, RevNetLayer, RevViTLayer
from petra.models.revnet import revnet18, revnet34, revnet50, revnet101

_RESNETS = (resnet18, resnet34, resnet50, resnet101, resnet32, resnet110, resnet164, resnet101_preact)
_REVNETS = (revnet18, revnet34, revnet50, revnet101, revnet38, revnet110, revnet164, revnet104, revnet602)

MODELS: dict[str, Callable[..., Model]] = {build.__name__: build for build in (*_RESNETS, *_REVNETS, gpt, revgpt)}
"""Builders by name. :mod:`petra.inplace_abn` adds its own when it is imported.

Every builder takes ``classes``. Builders that depend on the side of the images or the context length take it as ``size``. All
other arguments are options, which the configuration reads from the builders' signatures.
"""

TOKEN_MODELS = ("gpt", "revgpt", "huggingface")
"""Names of the models that take tokens: ours, and that of petra.huggingface.load. The others take images."""

__all__ = [
    "MODELS",
    "TOKEN_MODELS",
    "RevGPTLayer",
    "RevNetDownsample",
    "RevNetLayer",
    "RevViTLayer",
    "gpt",
    "resnet18",
    "resnet32",
    "resnet34",
    "resnet50",
    "resnet101",
    "resnet101_preact",
    "resnet110",
    "resnet164",
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
]
