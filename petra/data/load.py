"""Data sets by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from petra.data.cifar import cifar10, cifar100
from petra.data.dataset import Dataset
from petra.data.generated import digits, synthetic
from petra.data.imagenet import imagenet
from petra.data.imagenet32 import imagenet32
from petra.data.text import text
from petra.errors import ConfigError
from petra.specs import TensorSpec

DATASETS: dict[str, Callable[..., Dataset]] = {
    load.__name__: load for load in (digits, cifar10, cifar100, imagenet32, imagenet, synthetic, text)
}


def settings(name: str) -> frozenset[str]:
    """What can be set of a data set.

    Raises :class:`petra.errors.ConfigError` for an unknown name.
    """
    if name not in DATASETS:
        raise ConfigError(f"data.name: found {name!r}, accepted are {', '.join(DATASETS)}")
    return frozenset(inspect.signature(DATASETS[name]).parameters)


def load_dataset(name: str, **options: Any) -> Dataset:
    """A data set by its name, with settings of its own: those of the function of that name, see :data:`DATASETS`.

    Raises :class:`petra.errors.ConfigError` for an unknown name or setting and for values out of range,
    :class:`petra.errors.DataError` for files.
    """
    accepted = settings(name)
    if unknown := options.keys() - accepted:
        raise ConfigError(f"data.{min(unknown)}: {name} has no such setting, accepted are {', '.join(sorted(accepted)) or 'none'}")
    return DATASETS[name](**options)


def microbatch_form(name: str, batch_size: int, size: int) -> TensorSpec:
    """Form of a microbatch of inputs, known before anything is read."""
    if name == "text":
        return TensorSpec((batch_size, size), torch.int64)
    return TensorSpec((batch_size, 3, size, size), torch.float32)
