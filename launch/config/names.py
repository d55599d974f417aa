"""Names in petra's registries, repeated here so that a configuration can be checked before torch is imported."""

from __future__ import annotations

import re

from .checks import Check

MODELS = (
    *("resnet18", "resnet34", "resnet50", "resnet101", "resnet32", "resnet110", "resnet164", "resnet101_preact"),
    *("revnet18", "revnet34", "revnet50", "revnet101", "revnet38", "revnet110", "revnet164", "revnet104", "revnet602"),
    *("irevnet163", "irevnet301", "gpt", "revgpt", "revvit"),
    *("resnext101", "resnext152", "wide_resnet38", "deeplabv3"),
)
"""Keys of ``petra.models.MODELS``, those that ``petra.inplace_abn`` adds last."""
DATASETS = (
    *("digits", "cifar10", "cifar100", "imagenet32", "imagenet", "synthetic", "text", "tokens"),
    *("segmentation", "cityscapes", "vistas", "cocostuff"),
)
"""Keys of ``petra.data.DATASETS``, those that ``petra.inplace_abn`` adds last."""
OPTIMIZERS = ("sgd", "lars", "adam", "adamw", "muon", "nadam", "basis_rotation")
"""Keys of ``petra.training.OPTIMIZERS``."""
SCHEDULES = ("multistep", "cosine", "polynomial")
"""Keys of ``petra.training.SCHEDULES``."""
FORMATS = ("pt", "safetensors")
"""Keys of ``petra.training.FORMATS``."""
PREDICTIONS = ("none", "velocity", "decaying", "difference")
"""Values of ``petra.staleness.Prediction``."""
PRECISIONS = {"float32": None, "bf16": "bfloat16", "fp16": "float16"}
"""Names in torch of the types of ``trainer.precision``; None leaves tensors as they are."""
WIRES = ("float32", "bf16")
"""Those of them that messages between stages can have, for ``trainer.wire``."""

_OWN = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")


def is_own(name: str) -> bool:
    """Return whether a name is that of a function outside the package: ``package.module:function``."""
    return _OWN.fullmatch(name) is not None


def one_of_or_own(names: tuple[str, ...]) -> Check:
    """Accept the given names, and functions outside the package."""
    return Check(lambda name: name in names or is_own(name), lambda: f"{', '.join(names)} or module:function")
