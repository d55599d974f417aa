"""Data sets by name."""

from __future__ import annotations

from pathlib import Path

import torch

from petra.data.cifar import cifar10
from petra.data.dataset import ArrayDataset, channel_moments
from petra.errors import ConfigError

DATASETS = ("digits", "cifar10", "synthetic")


def load_dataset(name: str, root: str | Path | None = None, *, images: int = 1024, classes: int = 10) -> ArrayDataset:
    """A data set of 32x32 images in memory, the same in every process.

    - ``digits``: scikit-learn's 8x8 handwritten digits, enlarged; 1,437 training and 360 test images.
    - ``cifar10``: read from ``root``/cifar-10-batches-py.
    - ``synthetic``: noisy patterns, one per class; ``images`` for training and a quarter as many for testing.

    Raises :class:`petra.errors.ConfigError` for an unknown name or size, :class:`petra.errors.DataError` for files.
    """
    if name == "digits":
        return _digits()
    if name == "cifar10":
        return cifar10(root)
    if name == "synthetic":
        return _synthetic(images, classes)
    raise ConfigError(f"data.name: found {name!r}, accepted are {', '.join(DATASETS)}")


def _digits() -> ArrayDataset:
    from sklearn.datasets import load_digits

    digits = load_digits()
    # Sixteenths and 64ths of small integers are exact in float32, so the result doesn't depend on the machine.
    pixels = torch.from_numpy(digits.images).float()[:, None]
    enlarged = torch.nn.functional.interpolate(pixels, size=(32, 32), mode="bilinear", align_corners=False)
    images = (enlarged * (255 / 16)).round().to(torch.uint8).repeat(1, 3, 1, 1)
    labels = torch.from_numpy(digits.target).long()
    # Every fifth image in the order of the labels: each class gives the test set a fifth of its images.
    test = torch.zeros(len(labels), dtype=torch.bool)
    test[labels.argsort(stable=True)[::5]] = True
    mean, std = channel_moments(images[~test])
    return ArrayDataset("digits", 10, mean, std, images[~test], labels[~test], images[test], labels[test], flip=False)


def _synthetic(images: int, classes: int) -> ArrayDataset:
    if classes < 2:
        raise ConfigError(f"data.classes: found {classes}, accepted are whole numbers from 2 on")
    if images < 4:
        raise ConfigError(f"data.images: found {images}, accepted are whole numbers from 4 on")
    generator = torch.Generator().manual_seed(0)
    # Patterns of 8x8 pixel squares, mirror symmetric so that flips keep the class; noise fills the rest of the range.
    half = torch.randint(0, 192, (classes, 3, 4, 2), dtype=torch.uint8, generator=generator)
    patterns = torch.cat([half, half.flip(-1)], dim=-1).repeat_interleave(8, -1).repeat_interleave(8, -2)
    labels = torch.arange(images + images // 4) % classes
    noise = torch.randint(0, 65, (len(labels), 3, 32, 32), dtype=torch.uint8, generator=generator)
    pixels = noise.add_(patterns[labels])
    mean, std = channel_moments(pixels[:images])
    return ArrayDataset(
        "synthetic", classes, mean, std, pixels[:images], labels[:images], pixels[images:], labels[images:], flip=True
    )
