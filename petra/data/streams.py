"""Microbatches by number: the first stage asks for inputs and the last one for targets, and no labels travel."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from petra.data.dataset import ArrayDataset
from petra.errors import ConfigError
from petra.reversible import derive_seed
from petra.streams import IGNORED

PADDING = 4
"""Pixels that a crop may reach beyond each edge; raw value 0 there, as in He et al. 2015, section 4.2."""

_ORDER, _AUGMENTATION = 1, 2


class TrainStream:
    """Training data as an endless row of microbatches m = 0, 1, 2, ... that every process can read at any place.

    Microbatch m belongs to epoch m // batches_per_epoch. Each epoch visits the images in an order of its own; those
    that don't fill a last batch are left out of that epoch. Order and augmentation (a random crop, and a horizontal
    flip where the data set allows it) depend on nothing but the seed and m.

    Raises :class:`petra.errors.ConfigError` for a batch that is empty or larger than the training set.
    """

    def __init__(self, dataset: ArrayDataset, batch_size: int, seed: int, augment: bool = True) -> None:
        size = len(dataset.train_labels)
        if not 1 <= batch_size <= size:
            raise ConfigError(
                f"data.batch_size: found {batch_size}, accepted are 1 to {size}, the training images of {dataset.name}"
            )
        self.batches_per_epoch = size // batch_size
        self._dataset = dataset
        self._batch_size = batch_size
        self._seed = seed
        self._augment = augment
        # Two: when the pipeline crosses from one epoch to the next, its first stage is ahead of its last.
        self._order = lru_cache(maxsize=2)(self._permutation)

    def inputs(self, m: int) -> Tensor:
        """The normalised images of microbatch ``m``: float32 (B, 3, 32, 32)."""
        images = self._dataset.train_images.index_select(0, self._indices(m))
        if self._augment:
            images = augment(images, self._dataset.flip, derive_seed(self._seed, _AUGMENTATION, m))
        return self._dataset.normalise(images)

    def targets(self, m: int) -> Tensor:
        """The labels of microbatch ``m``: int64 (B,)."""
        return self._dataset.train_labels[self._indices(m)]

    def _indices(self, m: int) -> Tensor:
        epoch, position = divmod(m, self.batches_per_epoch)
        return self._order(epoch)[position * self._batch_size : (position + 1) * self._batch_size]

    def _permutation(self, epoch: int) -> Tensor:
        generator = torch.Generator().manual_seed(derive_seed(self._seed, _ORDER, epoch))
        return torch.randperm(len(self._dataset.train_labels), generator=generator)


class EvalStream:
    """The test images in their own order; the last batch is filled up, so that all batches have the same shape.

    Raises :class:`petra.errors.ConfigError` for an empty batch.
    """

    def __init__(self, dataset: ArrayDataset, batch_size: int) -> None:
        if batch_size < 1:
            raise ConfigError(f"data.batch_size: found {batch_size}, accepted are whole numbers from 1 on")
        self.batches = -(-len(dataset.test_labels) // batch_size)
        self._dataset = dataset
        self._batch_size = batch_size

    def inputs(self, m: int) -> Tensor:
        """The normalised images of batch ``m``: float32 (B, 3, 32, 32); the last image fills up the last batch."""
        return self._dataset.normalise(self._dataset.test_images[self._rows(m).clamp(max=self._last)])

    def targets(self, m: int) -> Tensor:
        """The labels of batch ``m``: int64 (B,), -100 in rows that only fill up."""
        rows = self._rows(m)
        return self._dataset.test_labels[rows.clamp(max=self._last)].masked_fill(rows > self._last, IGNORED)

    @property
    def _last(self) -> int:
        return len(self._dataset.test_labels) - 1

    def _rows(self, m: int) -> Tensor:
        return torch.arange(m * self._batch_size, (m + 1) * self._batch_size)


def augment(images: Tensor, flip: bool, seed: int) -> Tensor:
    """Each uint8 image of (B, C, H, W) cut at random from its zero-padded self and, if ``flip``, mirrored or not."""
    batch, channels, height, width = images.shape
    generator = torch.Generator().manual_seed(seed)
    top, left = torch.randint(0, 2 * PADDING + 1, (2, batch, 1), generator=generator)
    mirrored = torch.rand(batch, 1, generator=generator) < 0.5 * flip
    # One gather from the padded image does both: the mirror image is the crop's columns read backwards.
    rows = top + torch.arange(height)
    columns = left + torch.where(mirrored, torch.arange(width).flip(0), torch.arange(width))
    pixels = rows[:, :, None] * (width + 2 * PADDING) + columns[:, None, :]
    padded = torch.nn.functional.pad(images, (PADDING,) * 4).flatten(2)
    return padded.gather(2, pixels.view(batch, 1, -1).expand(-1, channels, -1)).view_as(images)
