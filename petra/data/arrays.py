"""Images in memory: normalised, and for training cropped and mirrored at random."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from petra.data.dataset import Dataset, Labels, Split

PADDING = 4
"""Pixels that a crop may reach beyond each edge; raw value 0 there, as in He et al. 2015, section 4.2."""
Moments = tuple[tuple[float, ...], tuple[float, ...]]
"""Mean and standard deviation of each channel, in units of the full range."""


@dataclass(frozen=True, eq=False)
class Images:
    """Reader of inputs: uint8 images (N, 3, H, W) with values 0..255.

    ``moments`` are those of the training images. ``flip`` says whether an image's mirror image still shows its class.
    """

    images: Tensor
    moments: Moments
    flip: bool

    def __call__(self, indices: Tensor, seed: int | None) -> Tensor:
        images = self.images.index_select(0, indices)
        return normalise(images if seed is None else augment(images, self.flip, seed), self.moments)


def array_dataset(
    name: str, classes: int, train: tuple[Tensor, Tensor], test: tuple[Tensor, Tensor], *, moments: Moments, flip: bool
) -> Dataset:
    """A data set of square images in memory; ``train`` and ``test`` are uint8 images (N, 3, H, H) and their labels (N,)."""
    splits = (Split(len(labels), Images(images, moments, flip), Labels(labels)) for images, labels in (train, test))
    return Dataset(name, classes, train[0].shape[-1], *splits)


def normalise(images: Tensor, moments: Moments) -> Tensor:
    """uint8 images (B, 3, H, W) as float32 of the same shape, with zero mean and unit deviation per channel."""
    mean, std = (255 * torch.tensor(values).view(-1, 1, 1) for values in moments)
    return images.float().sub_(mean).div_(std)


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


def channel_moments(images: Tensor) -> Moments:
    """Mean and standard deviation of each channel of uint8 images (N, C, H, W).

    The sums are taken over integers, so that every machine and thread count finds the same values to the last bit.
    """
    counts = torch.zeros(images.shape[1], 256, dtype=torch.int64)
    for some in torch.split(images, 8192):  # a channel's copy of all images could be as large as memory
        for channel, count in zip(some.unbind(1), counts, strict=True):
            count += torch.bincount(channel.flatten(), minlength=256)
    levels, pixels = torch.arange(256), images[:, 0].numel()
    means = [total / pixels for total in (counts * levels).sum(1).tolist()]
    squares: Sequence[int] = (counts * levels**2).sum(1).tolist()
    stds = [(square / pixels - mean**2) ** 0.5 / 255 for square, mean in zip(squares, means, strict=True)]
    return tuple(mean / 255 for mean in means), tuple(stds)
