"""Images and labels in memory, the form in which every data set reaches the streams."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class ArrayDataset:
    """A classification data set of 32x32 colour images.

    Images are uint8 (N, 3, 32, 32) with values 0..255, labels int64 (N,) with values 0..classes-1. ``mean`` and
    ``std`` are those of the training images' channels, in units of the full range (0..1). ``flip`` says whether an
    image's mirror image still shows its class.
    """

    name: str
    classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor
    flip: bool

    def normalise(self, images: Tensor) -> Tensor:
        """uint8 images (B, 3, H, W) as float32 of the same shape, with zero mean and unit deviation per channel."""
        mean = 255 * torch.tensor(self.mean).view(-1, 1, 1)
        std = 255 * torch.tensor(self.std).view(-1, 1, 1)
        return images.float().sub_(mean).div_(std)


def channel_moments(images: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of each channel of uint8 images (N, C, H, W), in units of the full range.

    The sums are taken over integers, so that every machine and thread count finds the same values to the last bit.
    """
    means, stds = [], []
    levels = torch.arange(256)
    for channel in images.unbind(1):
        counts = torch.bincount(channel.flatten(), minlength=256)
        mean = int((counts * levels).sum()) / channel.numel()
        means.append(mean / 255)
        stds.append((int((counts * levels**2).sum()) / channel.numel() - mean**2) ** 0.5 / 255)
    return tuple(means), tuple(stds)
