"""Microbatches by number: the first stage asks for inputs and the last one for targets, and no labels travel."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from petra.data.dataset import Dataset
from petra.data.prefetch import Prefetcher
from petra.errors import ConfigError
from petra.reversible import derive_seed
from petra.specs import IGNORED

_ORDER, _AUGMENTATION = 1, 2


class TrainStream:
    """Training data as an endless row of microbatches m = 0, 1, 2, ... that every process can read at any place.

    Microbatch m belongs to epoch m // batches_per_epoch. Each epoch visits the samples in an order of its own; those
    that don't fill a last batch are left out of that epoch. Order and augmentation depend on nothing but the seed and m.

    Args:
        workers: processes that prepare inputs ahead of their use; 0 prepares them when they are asked for.
        share: rows of each microbatch whose inputs are given, for one replica of several; targets are always those of all.

    Raises :class:`petra.errors.ConfigError` for a batch that is empty or larger than the training set.
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
        if not 1 <= batch_size <= self._split.count:
            raise ConfigError(
                f"data.batch_size: found {batch_size}, accepted are 1 to {self._split.count}, the samples that {dataset.name} has"
            )
        self.batches_per_epoch = self._split.count // batch_size
        self._batch_size = batch_size
        self._seed = seed
        self._augment = augment
        self._share = share
        # Two: when the pipeline crosses from one epoch to the next, its first stage is ahead of its last.
        self._order = lru_cache(maxsize=2)(self._permutation)
        self._read = Prefetcher(self._inputs, workers) if workers else self._inputs

    def inputs(self, m: int) -> Tensor:
        """The inputs of microbatch ``m``: images float32 (B, 3, H, W), or tokens int64 (B, T)."""
        return self._read(m)

    def targets(self, m: int) -> Tensor:
        """The targets of microbatch ``m``: int64 (B,) for images, (B·T,) for tokens."""
        assert self._split.targets is not None, "this process reads no targets"
        return self._split.targets(self._indices(m), self._augmentation(m))

    def _inputs(self, m: int) -> Tensor:
        assert self._split.inputs is not None, "this process reads no inputs"
        indices, seed = self._indices(m), self._augmentation(m)
        if seed is None or self._split.apart:
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


class EvalStream:
    """The test samples in their own order; the last batch is filled up, so that all batches have the same shape.

    Args:
        workers, share: as for :class:`TrainStream`.

    Raises :class:`petra.errors.ConfigError` for an empty batch.
    """

    def __init__(self, dataset: Dataset, batch_size: int, workers: int = 0, share: slice = slice(None)) -> None:
        if batch_size < 1:
            raise ConfigError(f"data.batch_size: found {batch_size}, accepted are whole numbers from 1 on")
        self._split = dataset.test
        self.batches = -(-self._split.count // batch_size)
        self._batch_size = batch_size
        self._share = share
        self._read = Prefetcher(self._inputs, workers, stop=self.batches) if workers else self._inputs

    def inputs(self, m: int) -> Tensor:
        """The inputs of batch ``m``, as those of :class:`TrainStream`; the last sample fills up the last batch."""
        return self._read(m)

    def targets(self, m: int) -> Tensor:
        """The targets of batch ``m``, -100 in rows that only fill up."""
        assert self._split.targets is not None, "this process reads no targets"
        rows = self._rows(m)
        found = self._split.targets(rows.clamp(max=self._last), None).view(len(rows), -1)
        return found.masked_fill((rows > self._last)[:, None], IGNORED).flatten()

    def _inputs(self, m: int) -> Tensor:
        assert self._split.inputs is not None, "this process reads no inputs"
        return self._split.inputs(self._rows(m)[self._share].clamp(max=self._last), None)

    @property
    def _last(self) -> int:
        return self._split.count - 1

    def _rows(self, m: int) -> Tensor:
        return torch.arange(m * self._batch_size, (m + 1) * self._batch_size)
