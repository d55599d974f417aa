"""Conversion of ResNet-18, 34, 50 and 101 weights from and to torchvision's names. torchvision itself isn't needed."""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from petra.errors import ModelError, invalid
from petra.model import Model

_BLOCK = r"layer(\d+)_(\d+)"
_NAMES = (
    (r"stem\.0", r"conv1"),
    (r"stem\.1", r"bn1"),
    (rf"{_BLOCK}\.shortcut", r"layer\1.\2.downsample"),
    # A branch repeats convolution, normalisation and ReLU.
    *((rf"{_BLOCK}\.branch\.{3 * i}", rf"layer\1.\2.conv{i + 1}") for i in range(3)),
    *((rf"{_BLOCK}\.branch\.{3 * i + 1}", rf"layer\1.\2.bn{i + 1}") for i in range(3)),
    (r"head\.linear", r"fc"),
)


def to_torchvision(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the state dictionary of a ResNet, or of some of its blocks, with torchvision's keys.

    Raises:
        ModelError: If torchvision's ResNets have no name for a key.
    """
    return {torchvision_name(key): value for key, value in state.items()}


def from_torchvision(model: Model, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a torchvision state dictionary with the keys of ``model.build(0).state_dict()``.

    Old files lack ``num_batches_tracked``. It is set to 0 then.

    Raises:
        ModelError: If a key is missing or unknown, or a tensor has another shape.
    """
    with torch.device("meta"):
        expected = model.build(0).state_dict()
    names = {torchvision_name(key): key for key in expected}
    given = {name: torch.tensor(0) for name in names if name.endswith("num_batches_tracked")} | dict(state)
    for name in names:
        if name not in given:
            raise ModelError(f"{name}: missing, but {model.name} has this key")
    for name, value in given.items():
        if name not in names:
            raise ModelError(f"{name}: unknown key, {model.name} doesn't have it")
        shape = expected[names[name]].shape
        if value.shape != shape:
            raise invalid(name, f"shape {list(shape)} for {model.name}", list(value.shape), ModelError)
    return {key: given[name] for name, key in names.items()}


def torchvision_name(key: str) -> str:
    """Return torchvision's name for a key of a ResNet's state dictionary.

    Raises:
        ModelError: If torchvision has no name for it.
    """
    for ours, theirs in _NAMES:
        name, replaced = re.subn(rf"^{ours}\.", rf"{theirs}.", key)
        if replaced:
            return name
    raise ModelError(f"{key}: torchvision's ResNets have no name for this key")
