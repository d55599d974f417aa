"""Data sources. The first stage reads inputs and the last stage reads targets by microbatch number, so no targets are sent."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable
from functools import lru_cache
from numbers import Integral, Real
from typing import TypeVar

import torch
from torch import Tensor

from petra.data.dataset import Dataset, Split
from petra.data.prefetch import TIMEOUT, Prefetcher
from petra.errors import invalid, require
from petra.reversible import derive_seed
from petra.specs import IGNORED

_ORDER, _AUGMENTATION = 1, 2
Read = TypeVar("Read")
RECENT = 256
"""Number of microbatches whose targets are kept if they were read together with the inputs. More than are in flight at a time."""
RECENT_DECODED = 2
"""Number of microbatches whose targets are kept if they are decoded from files, since they are large."""


def _split(dataset: object, part: str) -> Split:
    """Return a split itself, or the part of a data set.

    Raises:
        ConfigError: If it is neither.
    """
    split = getattr(dataset, part) if isinstance(dataset, Dataset) else dataset
    if not isinstance(split, Split):
        raise invalid("dataset", "a Dataset or Split (petra.data.from_dataset makes one)", type(dataset).__name__)
    return split


class _Source(ABC):
    """Reader of the microbatches of a split, which prepares them in worker processes if there are any.

    Args:
        split: The samples.
        workers: Number of worker processes that prepare microbatches in advance. 0 prepares them on request in this process.
        share: Rows of each microbatch that :meth:`inputs` returns, for one of several replicas. :meth:`targets` returns all rows.
        timeout: Seconds to wait for a microbatch from a worker process.
        stop: Number of the microbatch after the last one, or None for an endless sequence.
    """

    def __init__(self, split: Split, workers: int, share: slice, timeout: float, stop: int | None = None) -> None:
        require(isinstance(workers, Integral) and workers >= 0, "data.workers", "an integer >= 0", workers)
        require(isinstance(share, slice), "share", "a slice", share)
        require(isinstance(timeout, Real) and timeout > 0, "timeout", "a number > 0", timeout)
        self._split, self._share = split, share
        self._recent: OrderedDict[int, Tensor] = OrderedDict()
        self._reads_inputs = False
        self._newest_targets = -1

        def ahead(read: Callable[[int], Read], workers: int = workers) -> Callable[[int], Read]:
            return Prefetcher(read, workers, stop, timeout) if workers else read

        self._read, self._read_both, self._read_again = ahead(self._inputs), ahead(self._both), ahead(self._again)
        self._read_targets = ahead(self._targets, workers if split.decodes_targets else 0)

    @abstractmethod
    def _request(self, m: int) -> tuple[Tensor, int | None]:
        """Return the indices of the samples of microbatch ``m``, and the seed of its augmentation."""

    def inputs(self, m: int) -> Tensor:
        """Return the inputs of microbatch ``m``: float32 images (B, 3, H, W), or int64 tokens (B, T)."""
        if self._split.samples is None:
            return self._read(m)
        self._reads_inputs = True
        inputs, targets = self._read_both(m)
        self._recent[m] = targets.clone()  # not the worker's shared memory
        self._recent.move_to_end(m)
        if len(self._recent) > RECENT:
            self._recent.popitem(last=False)
        return inputs[self._share]

    def refetch(self, m: int) -> Tensor:
        """Return the inputs of microbatch ``m`` again, equal bit for bit, with the same augmentation.

        These inputs have workers of their own, as many as :meth:`inputs`: common workers would restart at each number that does not
        follow the last one.
        """
        return self._read_again(m)

    def targets(self, m: int) -> Tensor:
        """Return the targets of microbatch ``m``: int64 (B,) for images, (B·T,) for tokens, (B, H, W) for pixels."""
        assert self._split.targets is not None, "this process reads no targets"
        if self._split.decodes_targets:
            return self._decoded_targets(m)
        if self._split.samples is None:
            return self._targets(m)
        if m in self._recent:
            return self._recent[m]
        # Reading out of order would restart the workers that prepare inputs.
        return self._both(m)[1] if self._reads_inputs else self._read_both(m)[1]

    def _decoded_targets(self, m: int) -> Tensor:
        """Return targets from the workers, or decode them again. The last ones are kept: a diagnosis reads them again."""
        if m not in self._recent:
            restart = m <= self._newest_targets and m > 0  # an evaluation starts at 0 again
            self._recent[m] = self._targets(m) if restart else self._read_targets(m).clone()
            self._newest_targets = self._newest_targets if restart else m
            if len(self._recent) > RECENT_DECODED:
                self._recent.popitem(last=False)
        return self._recent[m]

    def _targets(self, m: int) -> Tensor:
        assert self._split.targets is not None, "this process reads no targets"
        return self._split.targets(*self._request(m))

    def _inputs(self, m: int) -> Tensor:
        assert self._split.inputs is not None, "this process reads no inputs"
        indices, seed = self._request(m)
        if seed is None or self._split.per_sample_augmentation:
            return self._split.inputs(indices[self._share], seed)
        return self._split.inputs(indices, seed)[self._share]

    def _again(self, m: int) -> Tensor:
        return self._inputs(m) if self._split.samples is None else self._both(m)[0][self._share]

    def _both(self, m: int) -> tuple[Tensor, Tensor]:
        assert self._split.samples is not None
        return self._split.samples(*self._request(m))


class TrainSource(_Source):
    """Source of training data: an endless sequence of microbatches m = 0, 1, 2, ... with random access.

    Microbatch m belongs to epoch m // batches_per_epoch. Each epoch has its own random order of samples. Samples that don't fill
    the last microbatch of an epoch are left out of that epoch. Order and augmentation depend on the seed and m only.

    Args:
        dataset: Data set whose training split is read, or a split.
        batch_size: Samples per microbatch.
        seed: Seed of order and augmentation.
        augment: Whether to augment inputs.
        workers: Number of worker processes that prepare microbatches in advance. 0 prepares them on request in this process.
        share: Rows of each microbatch that :meth:`inputs` returns, for one of several replicas. :meth:`targets` returns all rows.
        timeout: Seconds to wait for a microbatch from a worker process.

    Attributes:
        batches_per_epoch: Number of microbatches per epoch.
        preparation: How the data set prepares test images, or None.
        vocabulary: As :attr:`petra.data.Dataset.vocabulary`.

    Raises:
        ConfigError: If ``batch_size`` is less than 1 or exceeds the training set, or another argument is not accepted.
    """

    def __init__(
        self,
        dataset: Dataset | Split,
        batch_size: int,
        seed: int,
        augment: bool = True,
        workers: int = 0,
        share: slice = slice(None),
        timeout: float = TIMEOUT,
    ) -> None:
        split = _split(dataset, "train")
        name = f" of {dataset.name}" if isinstance(dataset, Dataset) else ""
        expected = f"an integer from 1 to {split.count}, the number of training samples{name}"
        require(isinstance(batch_size, Integral) and 1 <= batch_size <= split.count, "data.batch_size", expected, batch_size)
        require(isinstance(seed, Integral), "seed", "an integer", seed)
        require(isinstance(augment, bool), "augment", "true or false", augment)
        super().__init__(split, workers, share, timeout)
        self.batches_per_epoch = split.count // batch_size
        self.preparation = dataset.preparation if isinstance(dataset, Dataset) else None
        self.vocabulary = dataset.vocabulary if isinstance(dataset, Dataset) else None
        self._batch_size = batch_size
        self._seed = seed
        self._augment = augment
        # Two epochs: the first stage may read the next epoch while the last stage still reads the current one.
        self._order = lru_cache(maxsize=2)(self._permutation)

    def _request(self, m: int) -> tuple[Tensor, int | None]:
        epoch, position = divmod(m, self.batches_per_epoch)
        indices = self._order(epoch)[position * self._batch_size : (position + 1) * self._batch_size]
        period = epoch if self._split.epoch_seed else m
        return indices, derive_seed(self._seed, _AUGMENTATION, period) if self._augment else None

    def _permutation(self, epoch: int) -> Tensor:
        generator = torch.Generator().manual_seed(derive_seed(self._seed, _ORDER, epoch))
        if self._split.order is not None:
            return self._split.order(generator)
        return torch.randperm(self._split.count, generator=generator)


class EvalSource(_Source):
    """Source of test data: the test samples in their order. The last microbatch is padded to ``batch_size`` with
    the last sample, whose targets are -100.

    Args:
        dataset: Data set whose test split is read, or a split.
        batch_size: Samples per microbatch.
        workers, share, timeout: As for :class:`TrainSource`.

    Attributes:
        batches: Number of microbatches.
        bytes_per_target: As :attr:`petra.data.Dataset.bytes_per_target`.
        unit: What a target is counted as in records: ``images``, ``tokens`` or ``pixels``.

    Raises:
        ConfigError: If ``batch_size`` is not an integer >= 1, if padding is needed but targets are not integers, or if another
            argument is not accepted.
    """

    def __init__(
        self, dataset: Dataset | Split, batch_size: int, workers: int = 0, share: slice = slice(None), timeout: float = TIMEOUT
    ) -> None:
        require(isinstance(batch_size, Integral) and batch_size >= 1, "data.batch_size", "an integer >= 1", batch_size)
        split = _split(dataset, "test")
        whole = split.integer_targets or split.count % batch_size == 0
        expected = f"a divisor of the {split.count} test samples (the loss can't ignore padding rows unless targets are integers)"
        require(whole, "data.batch_size", expected, batch_size)
        self.batches = -(-split.count // batch_size)
        super().__init__(split, workers, share, timeout, self.batches)
        self.bytes_per_target = dataset.bytes_per_target if isinstance(dataset, Dataset) else None
        self.unit = "images"
        self._batch_size = batch_size

    def targets(self, m: int) -> Tensor:
        """Return the targets of microbatch ``m``, -100 in padding rows."""
        targets, rows = super().targets(m), self._rows(m)
        if rows[-1] <= self._last:
            return targets
        return targets.reshape(len(rows), -1).masked_fill((rows > self._last)[:, None], IGNORED).view_as(targets)

    def _request(self, m: int) -> tuple[Tensor, int | None]:
        return self._rows(m).clamp(max=self._last), None

    @property
    def _last(self) -> int:
        return self._split.count - 1

    def _rows(self, m: int) -> Tensor:
        return torch.arange(m * self._batch_size, (m + 1) * self._batch_size)
