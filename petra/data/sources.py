"""Data sources. The first stage reads inputs and the last stage reads targets by microbatch number, so no targets are sent."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from petra.data.dataset import Dataset
from petra.data.prefetch import Prefetcher
from petra.errors import require
from petra.reversible import derive_seed
from petra.specs import IGNORED

_ORDER, _AUGMENTATION = 1, 2


class TrainSource:
    """Source of training data: an endless sequence of microbatches m = 0, 1, 2, ... with random access.

    Microbatch m belongs to epoch m // batches_per_epoch. Each epoch has its own random order of samples. Samples that don't fill
    the last microbatch of an epoch are left out of that epoch. Order and augmentation depend on the seed and m only.

    Args:
        dataset: Data set whose training split is read.
        batch_size: Samples per microbatch.
        seed: Seed of order and augmentation.
        augment: Whether to augment inputs.
        workers: Number of worker processes that prepare inputs in advance. 0 prepares them on request in this process.
        share: Rows of each microbatch that :meth:`inputs` returns, for one of several replicas. :meth:`targets` returns all rows.

    Attributes:
        batches_per_epoch: Number of microbatches per epoch.

    Raises:
        ConfigError: If ``batch_size`` is less than 1 or exceeds the training set.
    """

    def __init__(
        self,
        dataset: Dataset,
        batch_size: int,
        seed: int,
        augment: bool = True,
        workers: int = 0,
        share: slice = slice(None),
    ) -> None:
        self._split = dataset.train
        count = self._split.count
        expected = f"an integer from 1 to {count}, the number of training samples of {dataset.name}"
        require(1 <= batch_size <= count, "data.batch_size", expected, batch_size)
        self.batches_per_epoch = count // batch_size
        self._batch_size = batch_size
        self._seed = seed
        self._augment = augment
        self._share = share
        # Two epochs: the first stage may read the next epoch while the last stage still reads the current one.
        self._order = lru_cache(maxsize=2)(self._permutation)
        self._read = Prefetcher(self._inputs, workers) if workers else self._inputs

    def inputs(self, m: int) -> Tensor:
        """Return the inputs of microbatch ``m``: float32 images (B, 3, H, W), or int64 tokens (B, T)."""
        return self._read(m)

    def targets(self, m: int) -> Tensor:
        """Return the targets of microbatch ``m``: int64 (B,) for images, (B·T,) for tokens."""
        assert self._split.targets is not None, "this process reads no targets"
        return self._split.targets(self._indices(m), self._augmentation(m))

    def _inputs(self, m: int) -> Tensor:
        assert self._split.inputs is not None, "this process reads no inputs"
        indices, seed = self._indices(m), self._augmentation(m)
        if seed is None or self._split.per_sample_augmentation:
            return self._split.inputs(indices[self._share], seed)
        return self._split.inputs(indices, seed)[self._share]

    def _augmentation(self, m: int) -> int | None:
        return derive_seed(self._seed, _AUGMENTATION, m) if self._augment else None

    def _indices(self, m: int) -> Tensor:
        epoch, position = divmod(m, self.batches_per_epoch)
        return self._order(epoch)[position * self._batch_size : (position + 1) * self._batch_size]

    def _permutation(self, epoch: int) -> Tensor:
        generator = torch.Generator().manual_seed(derive_seed(self._seed, _ORDER, epoch))
        return torch.randperm(self._split.count, generator=generator)


class EvalSource:
    """Source of test data: the test samples in their order. The last microbatch is padded to ``batch_size``.

    Args:
        dataset: Data set whose test split is read.
        batch_size: Samples per microbatch.
        workers, share: As for :class:`TrainSource`.

    Attributes:
        batches: Number of microbatches.
        bytes_per_target: As :attr:`petra.data.Dataset.bytes_per_target`.

    Raises:
        ConfigError: If ``batch_size`` is not an integer >= 1.
    """

    def __init__(self, dataset: Dataset, batch_size: int, workers: int = 0, share: slice = slice(None)) -> None:
        require(batch_size >= 1, "data.batch_size", "an integer >= 1", batch_size)
        self._split = dataset.test
        self.batches = -(-self._split.count // batch_size)
        self.bytes_per_target = dataset.bytes_per_target
        self._batch_size = batch_size
        self._share = share
        self._read = Prefetcher(self._inputs, workers, stop=self.batches) if workers else self._inputs

    def inputs(self, m: int) -> Tensor:
        """Return the inputs of microbatch ``m``, as :meth:`TrainSource.inputs`. Padding rows repeat the last sample."""
        return self._read(m)

    def targets(self, m: int) -> Tensor:
        """Return the targets of microbatch ``m``, -100 in padding rows."""
        assert self._split.targets is not None, "this process reads no targets"
        rows = self._rows(m)
        targets = self._split.targets(rows.clamp(max=self._last), None).view(len(rows), -1)
        return targets.masked_fill((rows > self._last)[:, None], IGNORED).flatten()

    def _inputs(self, m: int) -> Tensor:
        assert self._split.inputs is not None, "this process reads no inputs"
        return self._split.inputs(self._rows(m)[self._share].clamp(max=self._last), None)

    @property
    def _last(self) -> int:
        return self._split.count - 1

    def _rows(self, m: int) -> Tensor:
        return torch.arange(m * self._batch_size, (m + 1) * self._batch_size)
