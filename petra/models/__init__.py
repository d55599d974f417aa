"""Networks as lists of blocks, ready to be cut into stages."""

from collections.abc import Callable

from petra.model import Model
from petra.models.resnet import resnet18, resnet34, resnet50, resnet101
from petra.models.revnet import revnet18, revnet34, revnet50, revnet101

MODELS: dict[str, Callable[..., Model]] = {
    build.__name__: build for build in (resnet18, resnet34, resnet50, resnet101, revnet18, revnet34, revnet50, revnet101)
}
"""By name; all take ``classes``, ``width`` and ``stem``."""

__all__ = [
    "MODELS",
    "resnet18",
    "resnet34",
    "resnet50",
    "resnet101",
    "revnet18",
    "revnet34",
    "revnet50",
    "revnet101",
]
