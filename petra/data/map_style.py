"""Data sets of other libraries as microbatches: any map-style data set of torch, and data sets of Hugging Face."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate, get_worker_info

from petra.data.dataset import Split
from petra.errors import DataError, PetraError, first_line, invalid, require
from petra.reversible import derive_seed, seeded
from petra.specs import are_integers

Collate = Callable[[list[Any]], tuple[Tensor, Tensor]]
"""Map from a list of B samples to the inputs (B, ...) and the targets, (B, ...) or (B·T,)."""
PAIR = "a function that returns the tensors (inputs, targets) for a list of samples"


class MapStyle(Protocol):
    """A data set with random access, such as ``torch.utils.data.Dataset`` or ``datasets.Dataset``."""

    def __getitem__(self, index: int, /) -> Any: ...

    def __len__(self) -> int: ...


def from_dataset(dataset: MapStyle, collate: Collate | None = None) -> Split:
    """Return a map-style data set as a split, which :class:`TrainSource` and :class:`EvalSource` accept.

    The order of the samples, workers and resuming are those of petra's own data sets. Random numbers that a sample draws from the
    global generators of torch, numpy or Python depend on the seed, the epoch and the sample only; those that ``collate`` draws, on
    the samples of the microbatch too. A sample is read once for inputs and targets, also with workers, unless the first and the
    last stage are in different processes: then each of the two processes reads it.

    Args:
        dataset: The data set. Its samples are read by index, also in forked worker processes.
        collate: Function that makes the tensors (inputs, targets) of a microbatch from a list of samples, with one row per sample.
            By default ``torch.utils.data.default_collate``, for samples that are pairs (input, target).

    Raises:
        ConfigError: If ``dataset`` is empty or not map-style, or if ``collate`` does not return two tensors for the first sample.
        DataError: If the first sample can't be read.
    """
    map_style = all(hasattr(type(dataset), name) for name in ("__getitem__", "__len__"))
    require(map_style, "dataset", "a map-style data set, with __getitem__ and __len__", type(dataset).__name__)
    require(len(dataset) >= 1, "dataset", "at least one sample", "none")
    require(collate is None or callable(collate), "collate", PAIR, type(collate).__name__)
    make = collate or cast(Collate, default_collate)

    def samples(indices: Tensor, seed: int | None) -> tuple[Tensor, Tensor]:
        seed, numbers = seed or 0, indices.tolist()
        with _preserved_generators():
            rows = []
            for i in numbers:
                _seed_generators(derive_seed(seed, i))
                with _named(f"dataset: sample {i} can't be read"):
                    rows.append(dataset[i])
            _seed_generators(derive_seed(seed, len(numbers), *numbers))
            with _named(f"collate: failed for samples {', '.join(map(str, numbers[:4]))}{', ...' if len(numbers) > 4 else ''}"):
                found: object = make(rows)
        return _checked(found, len(numbers))

    _, targets = samples(torch.zeros(1, dtype=torch.long), None)
    inputs_of, targets_of = (partial(_column, samples, part) for part in (0, 1))
    return Split(len(dataset), inputs_of, targets_of, True, samples, integer_targets=are_integers(targets), decodes_targets=True)


def _column(samples: Callable[[Tensor, int | None], tuple[Tensor, Tensor]], part: int, indices: Tensor, seed: int | None) -> Tensor:
    return samples(indices, seed)[part]


@contextmanager
def _named(what: str) -> Iterator[None]:
    """Raise a DataError that says what failed. Functions and data sets of users can raise any exception."""
    try:
        yield
    except PetraError:
        raise
    except Exception as error:
        raise DataError(f"{what} ({type(error).__name__}: {first_line(error)})") from error


def _checked(found: Any, rows: int) -> tuple[Tensor, Tensor]:
    if not isinstance(found, Sequence) or len(found) != 2 or not all(isinstance(part, Tensor) for part in found):
        raise invalid("collate", PAIR, [type(part).__name__ for part in found] if isinstance(found, list | tuple) else type(found))
    inputs, targets = found
    for name, part in (("inputs", inputs), ("targets", targets)):
        fits = part.dim() > 0 and (len(part) == rows or (name == "targets" and len(part) % rows == 0 and len(part) > 0))
        require(fits, "collate", f"{name} with a row for each of {rows} samples", f"shape {list(part.shape)}")
    return inputs, targets.long() if are_integers(targets) else targets  # -100 marks padding


@contextmanager
def _preserved_generators() -> Iterator[None]:
    """Restore the global random number generators at the end. Worker processes have generators of their own."""
    python, numpy = random.getstate(), np.random.get_state()
    # Keeps other threads from torch's generator, and restores it. A worker has no other threads, but may have inherited their lock.
    with seeded(None if get_worker_info() else 0):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)


@contextmanager
def seeded_generators(seed: int) -> Iterator[None]:
    """Seed the global random number generators of Python, NumPy and torch, and restore them at the end."""
    with _preserved_generators():
        _seed_generators(seed)
        yield


def _seed_generators(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)  # torch.manual_seed would also seed the GPUs
