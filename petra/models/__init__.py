"""Networks as lists of blocks, ready to be cut into stages."""

from collections.abc import Callable

from petra.model import Model
from petra.models.resnet import resnet18
from petra.models.revnet import revnet18

MODELS: dict[str, Callable[..., Model]] = {"resnet18": resnet18, "revnet18": revnet18}

__all__ = ["MODELS", "resnet18", "revnet18"]
