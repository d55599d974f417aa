"""Data sets by name, and data sources that return microbatches by number."""

from collections.abc import Callable
from inspect import signature
from typing import Any

import torch

from petra.data import generated, imagenet, releases, tokens
from petra.data.dataset import Dataset, Split
from petra.data.map_style import from_dataset
from petra.data.preparation import Preparation
from petra.data.sources import EvalSource, TrainSource
from petra.errors import alternatives, invalid, require
from petra.specs import TensorSpec

_FILES = (releases.cifar10, releases.cifar100, releases.imagenet32, imagenet.imagenet, tokens.text, tokens.tokens)
DATASETS: dict[str, Callable[..., Dataset]] = {load.__name__: load for load in (generated.digits, generated.synthetic, *_FILES)}
"""Functions that return a data set, by name. :mod:`petra.inplace_abn` adds its own when it is imported."""
DECODED = {"imagenet"}
"""Names of the data sets whose samples are decoded from files whenever they are read, without :attr:`Split.in_memory`."""

__all__ = [
    "DATASETS",
    "DECODED",
    "Dataset",
    "EvalSource",
    "Preparation",
    "Split",
    "TrainSource",
    "from_dataset",
    "load_dataset",
    "microbatch_form",
]


def load_dataset(name: str, **options: Any) -> Dataset:
    """Return a data set.

    Args:
        name: Key of :data:`DATASETS`.
        options: Arguments of its function.

    Raises:
        ConfigError: If the name or an option is unknown, or a value is out of range.
        DataError: If a file is missing or damaged.
    """
    require(name in DATASETS, "name", alternatives(DATASETS), name)
    for option in options.keys() - signature(DATASETS[name]).parameters.keys():
        raise invalid(f"data.{option}", f"an argument of {name}", "another")
    return DATASETS[name](**options)


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
