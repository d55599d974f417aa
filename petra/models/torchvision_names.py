"""The ResNets 18, 34, 50 and 101 under torchvision's names, to exchange weights with it; torchvision itself isn't needed."""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from petra.errors import ModelError
from petra.model import Model

_BLOCK = r"layer(\d+)_(\d+)"
_NAMES = (
    (r"stem\.0", r"conv1"),
    (r"stem\.1", r"bn1"),
    (rf"{_BLOCK}\.shortcut", r"layer\1.\2.downsample"),
    # A branch is convolution, normalisation, ReLU, and so on.
    *((rf"{_BLOCK}\.branch\.{3 * i}", rf"layer\1.\2.conv{i + 1}") for i in range(3)),
    *((rf"{_BLOCK}\.branch\.{3 * i + 1}", rf"layer\1.\2.bn{i + 1}") for i in range(3)),
    (r"head\.linear", r"fc"),
)


def to_torchvision(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The state of a ResNet, or of some of its blocks, under torchvision's names.

    Raises:
        ModelError: a key that none of these ResNets has.
    """
    return {torchvision_name(key): value for key, value in state.items()}


def from_torchvision(model: Model, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A state under torchvision's names as one for ``model.build(0).load_state_dict``.

    Files from before batch normalisation counted its batches lack ``num_batches_tracked``, which is then 0.

    Raises:
        ModelError: a key is missing, unknown or of another shape.
    """
    with torch.device("meta"):
        accepted = model.build(0).state_dict()
    names = {torchvision_name(key): key for key in accepted}
    found = {name: torch.tensor(0) for name in names if name.endswith("num_batches_tracked")} | dict(state)
    for name in names:
        if name not in found:
            raise ModelError(f"{name}: not found, but {model.name} has it")
    for name, value in found.items():
        if name not in names:
            raise ModelError(f"{name}: found, but {model.name} has no such key")
        shape = accepted[names[name]].shape
        if value.shape != shape:
            raise ModelError(f"{name}: found {list(value.shape)}, accepted is {list(shape)} for {model.name}")
    return {key: found[name] for name, key in names.items()}


def torchvision_name(key: str) -> str:
    """torchvision's name for a key of a ResNet's state; raises :class:`petra.errors.ModelError` if it has none."""
    for ours, theirs in _NAMES:
        name, found = re.subn(rf"^{ours}\.", rf"{theirs}.", key)
        if found:
            return name
    raise ModelError(f"{key}: found a key for which torchvision's ResNets have no name")
