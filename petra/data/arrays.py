"""Images in memory: normalisation, and random crops and flips for training."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from petra.data.dataset import Dataset, Split, labels_of
from petra.data.preparation import Moments, Preparation, normalise
from petra.reversible import derive_seed

PADDING = 4
"""Zero padding at each edge before a random crop, in pixels (He et al. 2015, section 4.2)."""


@dataclass(frozen=True, eq=False)
class Images:
    """Reader of inputs from images in memory.

    Attributes:
        images: uint8 images, (N, 3, H, W).
        moments: Mean and standard deviation of each channel of the training images.
        flip: Whether augmentation includes horizontal flips.
    """

    images: Tensor
    moments: Moments
    flip: bool

    def __call__(self, indices: Tensor, seed: int | None) -> Tensor:
        """Return normalised images (B, 3, H, W), augmented if a seed is given."""
        images = self.images.index_select(0, indices)
        if seed is None:
            return normalise(images, self.moments)
        if isinstance(self.moments[0][0], float):
            return normalise(augment(images, self.flip, seed, indices), self.moments)
        # A mean image is subtracted while pixels are in their places. The padding of a crop then has its value.
        return augment(normalise(images, self.moments), self.flip, seed, indices)


def array_dataset(
    name: str,
    classes: int,
    train: tuple[Tensor, Tensor],
    test: tuple[Tensor, Tensor],
    *,
    moments: Moments | None = None,
    flip: bool = True,
    mean_image: bool = False,
    names: tuple[str, ...] = (),
) -> Dataset:
    """Return a data set of square images in memory.

    Args:
        name: Name of the data set.
        classes: Number of classes.
        train, test: uint8 images (N, 3, H, H) and their labels (N,).
        moments, flip: As for :class:`Images`. The default are the moments of the training images.
        mean_image: Whether to subtract the mean training image from pixel values of 0 to 1 instead.
        names: Names of the classes, in the order of their numbers, or none.
    """
    moments, size = moments or channel_moments(train[0]), train[0].shape[-1]
    if mean_image:
        moments = (train[0].sum(0, dtype=torch.int64).double() / (255 * len(train[0]))).tolist(), (1.0, 1.0, 1.0)
    first, second = (
        Split(len(labels), Images(images, moments, flip), partial(labels_of, labels), epoch_seed=True, in_memory=True)
        for images, labels in (train, test)
    )
    return Dataset(name, classes, size, first, second, preparation=Preparation(size, moments, classes=names))


def augment(images: Tensor, flip: bool, seed: int, indices: Tensor) -> Tensor:
    """Return a random crop of each zero-padded image, flipped horizontally with probability 1/2 if ``flip`` is set.

    Args:
        images: Images of any type, (B, C, H, W).
        flip: Whether to flip.
        seed: Seed of the random numbers.
        indices: Index of each image in its data set (B,). The augmentation of an image depends on the seed and its index only.
    """
    batch, channels, height, width = images.shape
    drawn = torch.tensor([derive_seed(seed, index) for index in indices.tolist()])[:, None]
    positions = 2 * PADDING + 1
    top, left = drawn % positions, drawn // positions % positions
    mirrored = (drawn // positions**2 % 2 == 1) & flip
    # One gather from the padded image crops and flips: a flipped crop reads its columns in reverse order.
    rows = top + torch.arange(height)
    columns = left + torch.where(mirrored, torch.arange(width).flip(0), torch.arange(width))
    pixels = rows[:, :, None] * (width + 2 * PADDING) + columns[:, None, :]
    padded = torch.nn.functional.pad(images, (PADDING,) * 4).flatten(2)
    return padded.gather(2, pixels.view(batch, 1, -1).expand(-1, channels, -1)).view_as(images)


def channel_moments(images: Tensor) -> Moments:
    """Return mean and standard deviation of each channel of uint8 images (N, C, H, W).

    Sums are integers, so results are the same bit for bit on every machine and with any number of threads.
    """
    sums = torch.zeros(2, images.shape[1], dtype=torch.int64)
    for part in torch.split(images, 8192):  # limits the size of a copy
        values = part.transpose(0, 1).flatten(1).long()
        sums += torch.stack([values.sum(1), values.square().sum(1)])
    pixels = images[:, 0].numel()
    means, squares = ([total / pixels for total in row] for row in sums.tolist())
    stds = [(square - mean**2) ** 0.5 / 255 for mean, square in zip(means, squares, strict=True)]
    return tuple(mean / 255 for mean in means), tuple(stds)
