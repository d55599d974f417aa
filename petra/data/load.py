"""Data sets by name, and their settings."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from petra.data.dataset import Dataset
from petra.data.generated import digits, synthetic
from petra.data.imagenet import imagenet
from petra.data.releases import cifar10, cifar100, imagenet32
from petra.data.tokens import text, tokens
from petra.errors import ConfigError, alternatives, require
from petra.specs import TensorSpec

_ALL = (digits, cifar10, cifar100, imagenet32, imagenet, synthetic, text, tokens)
DATASETS: dict[str, Callable[..., Dataset]] = {load.__name__: load for load in _ALL}
"""Functions that return a data set, by name. Their arguments are the settings of the data set. :mod:`petra.inplace_abn` adds its
own when it is imported."""
DECODED = {"imagenet"}
"""Names of the data sets whose samples are decoded from files whenever they are read."""


def settings(name: str) -> frozenset[str]:
    """Return the names of a data set's settings.

    Raises:
        ConfigError: If ``name`` is unknown.
    """
    require(name in DATASETS, "data.name", alternatives(DATASETS), name)
    return frozenset(inspect.signature(DATASETS[name]).parameters)


def load_dataset(name: str, **options: Any) -> Dataset:
    """Return a data set.

    Args:
        name: Key of :data:`DATASETS`.
        options: Settings of the data set: arguments of its function.

    Raises:
        ConfigError: If the name or a setting is unknown, or a value is out of range.
        DataError: If a file is missing or damaged.
    """
    accepted = settings(name)
    if unknown := options.keys() - accepted:
        known = f"its settings are {', '.join(sorted(accepted))}" if accepted else "it has none"
        raise ConfigError(f"data.{min(unknown)}: {name} has no such setting, {known}")
    return DATASETS[name](**options)


def in_memory(name: str) -> bool:
    """Return :attr:`petra.data.Split.in_memory` of a data set without reading data."""
    return name not in DECODED


def microbatch_form(name: str, batch_size: int, size: int, height: int | None = None) -> TensorSpec:
    """Return shape and type of a microbatch of inputs without reading data.

    Args:
        name: Name of the data set.
        batch_size: Samples per microbatch.
        size: Side of an image in pixels, or tokens of a window.
        height: Height of an image in pixels if it is not ``size``.
    """
    if name in ("text", "tokens"):
        return TensorSpec((batch_size, size), torch.int64)
    return TensorSpec((batch_size, 3, height or size, size), torch.float32)
