"""Images in memory: normalisation, and random crops and flips for training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from petra.data.dataset import Dataset, Labels, Split
from petra.data.preparation import Moments, Preparation, centre, encoded, normalise
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
        mean_image: Mean of the training images, (3, H, W), to subtract from pixel values instead of the channel means; or None.
    """

    images: Tensor
    moments: Moments
    flip: bool
    mean_image: Tensor | None = None

    def __call__(self, indices: Tensor, seed: int | None) -> Tensor:
        """Return normalised images (B, 3, H, W), augmented if a seed is given."""
        images = self.images.index_select(0, indices)
        if self.mean_image is not None:
            # Before augmentation, while pixels are in their places. The padding of a crop then has the value of the mean image.
            centred = centre(images, self.mean_image)
            return centred if seed is None else augment(centred, self.flip, seed, indices)
        return normalise(images if seed is None else augment(images, self.flip, seed, indices), self.moments)


def array_dataset(
    name: str,
    classes: int,
    train: tuple[Tensor, Tensor],
    test: tuple[Tensor, Tensor],
    *,
    moments: Moments,
    flip: bool,
    mean_image: bool = False,
    names: Sequence[str] = (),
) -> Dataset:
    """Return a data set of square images in memory.

    Args:
        name: Name of the data set.
        classes: Number of classes.
        train, test: uint8 images (N, 3, H, H) and their labels (N,).
        moments, flip: As for :class:`Images`.
        mean_image: Whether to subtract the mean training image instead of the channel means.
        names: Names of the classes, in the order of their numbers, or none.
    """
    mean = train[0].sum(0, dtype=torch.int64).double().div(len(train[0])).float() if mean_image else None
    first, second = (
        Split(
            len(labels),
            Images(images, moments, flip, mean),
            Labels(labels),
            epoch_seed=True,
            in_memory=True,
        )
        for images, labels in (train, test)
    )
    size = train[0].shape[-1]
    subtracted = None if mean is None else encoded(mean)
    return Dataset(name, classes, size, first, second, preparation=Preparation(size, moments, 1.0, subtracted, tuple(names)))


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
    counts = torch.zeros(images.shape[1], 256, dtype=torch.int64)
    for part in torch.split(images, 8192):  # limits the size of the contiguous copy of a channel
        for channel, count in zip(part.unbind(1), counts, strict=True):
            count += torch.bincount(channel.flatten(), minlength=256)
    levels, pixels = torch.arange(256), images[:, 0].numel()
    means = [total / pixels for total in (counts * levels).sum(1).tolist()]
    squares: Sequence[int] = (counts * levels**2).sum(1).tolist()
    stds = [(square / pixels - mean**2) ** 0.5 / 255 for square, mean in zip(squares, means, strict=True)]
    return tuple(mean / 255 for mean in means), tuple(stds)
