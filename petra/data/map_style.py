"""Data sets of other libraries as microbatches: any map-style data set of torch, and data sets of Hugging Face."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
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
MAP_STYLE = "a map-style data set, with __getitem__ and __len__"
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
    count = _count(dataset)
    require(collate is None or callable(collate), "collate", PAIR, type(collate).__name__)
    samples = Samples(dataset, collate or cast(Collate, default_collate))
    _, targets = samples(torch.zeros(1, dtype=torch.long), None)
    integers = are_integers(targets)
    return Split(count, Column(samples, 0), Column(samples, 1), epoch_seed=True, samples=samples, integer_targets=integers)


def _count(dataset: Any) -> int:
    # torch's Dataset defines __getitem__ for iterable data sets too, but they have no length.
    require(hasattr(type(dataset), "__getitem__"), "dataset", MAP_STYLE, type(dataset).__name__)
    try:
        count = len(dataset)
    except TypeError as error:
        raise invalid("dataset", MAP_STYLE, f"{type(dataset).__name__} without a length") from error
    require(count >= 1, "dataset", "at least one sample", "none")
    return count


@dataclass(frozen=True, eq=False)
class Samples:
    """Reader of inputs and targets together.

    Attributes:
        dataset: Data set of single samples.
        collate: Function that makes a microbatch of a list of samples.
    """

    dataset: MapStyle
    collate: Collate

    def __call__(self, indices: Tensor, seed: int | None) -> tuple[Tensor, Tensor]:
        """Return inputs and targets of the samples.

        Raises:
            ConfigError: If ``collate`` returns something else than two tensors with one row per sample.
            DataError: If a sample can't be read or the samples don't fit together.
        """
        seed = seed or 0
        with _preserved_generators():
            numbers = indices.tolist()
            rows = [self._sample(i, derive_seed(seed, i)) for i in numbers]
            _seed_generators(derive_seed(seed, len(numbers), *numbers))
            try:
                found: Any = self.collate(rows)
            except PetraError:
                raise
            except Exception as error:  # a user's function, or samples of different shapes
                raise DataError(f"collate: failed for samples {_shortened(indices)} ({_described(error)})") from error
        return _checked(found, len(indices))

    def _sample(self, index: int, seed: int) -> Any:
        _seed_generators(seed)
        try:
            return self.dataset[index]
        except PetraError:
            raise
        except Exception as error:  # a user's data set can raise any exception
            raise DataError(f"dataset: sample {index} can't be read ({_described(error)})") from error


@dataclass(frozen=True, eq=False)
class Column:
    """Reader of the inputs (0) or the targets (1) alone."""

    samples: Samples
    index: int

    def __call__(self, indices: Tensor, seed: int | None) -> Tensor:
        return self.samples(indices, seed)[self.index]


def _checked(found: Any, rows: int) -> tuple[Tensor, Tensor]:
    if not isinstance(found, Sequence) or len(found) != 2 or not all(isinstance(part, Tensor) for part in found):
        raise invalid("collate", PAIR, _form(found))
    inputs, targets = found
    for name, part in (("inputs", inputs), ("targets", targets)):
        fits = part.dim() > 0 and (len(part) == rows or (name == "targets" and len(part) % rows == 0 and len(part) > 0))
        require(fits, "collate", f"{name} with a row for each of {rows} samples", f"shape {list(part.shape)}")
    return inputs, targets.long() if are_integers(targets) else targets  # -100 marks padding


def _form(found: Any) -> str:
    """Describe what a function returned instead of two tensors."""
    if isinstance(found, dict):
        return f"a dictionary with the keys {', '.join(map(str, found))}"
    if isinstance(found, list | tuple):
        return f"({', '.join(type(part).__name__ for part in found)})"
    return type(found).__name__


def _described(error: Exception) -> str:
    return f"{type(error).__name__}: {first_line(error)}"


def _shortened(indices: Tensor) -> str:
    shown = ", ".join(str(i) for i in indices[:4].tolist())
    return f"{shown}, ..." if len(indices) > 4 else shown


@contextmanager
def _preserved_generators() -> Iterator[None]:
    """Restore the global random number generators at the end. Worker processes have generators of their own."""
    if get_worker_info() is not None:
        yield
        return
    python, numpy = random.getstate(), np.random.get_state()
    with seeded(0):  # keeps other threads from torch's generator, and restores it
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)


def _seed_generators(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)  # torch.manual_seed would also seed the GPUs
