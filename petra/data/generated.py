"""Data sets that need no files: scikit-learn's digits, and synthetic patterns of any size."""

from __future__ import annotations

import torch
from torch import Tensor

from petra.data.arrays import array_dataset, channel_moments
from petra.data.dataset import Dataset
from petra.errors import ConfigError, first_line


def digits() -> Dataset:
    """scikit-learn's 8x8 handwritten digits, enlarged to 32x32; 1,437 training and 360 test images."""
    from sklearn.datasets import load_digits

    found = load_digits()
    # Sixteenths and 64ths of small integers are exact in float32, so the result doesn't depend on the machine.
    pixels = torch.from_numpy(found.images).float()[:, None]
    enlarged = torch.nn.functional.interpolate(pixels, size=(32, 32), mode="bilinear", align_corners=False)
    images = (enlarged * (255 / 16)).round().to(torch.uint8).repeat(1, 3, 1, 1)
    labels = torch.from_numpy(found.target).long()
    # Every fifth image in the order of the labels: each class gives the test set a fifth of its images.
    test = torch.zeros(len(labels), dtype=torch.bool)
    test[labels.argsort(stable=True)[::5]] = True
    return array_dataset(
        "digits",
        10,
        (images[~test], labels[~test]),
        (images[test], labels[test]),
        moments=channel_moments(images[~test]),
        flip=False,
    )


def synthetic(images: int = 1024, classes: int = 10, size: int = 32) -> Dataset:
    """Noisy patterns of ``size`` x ``size`` pixels, one per class; ``images`` for training and a quarter as many for testing.

    Raises:
        ConfigError: a number that is too small, or more images than there is memory for.
    """
    for key, value, least in (("classes", classes, 2), ("images", images, 4), ("size", size, 4)):
        if value < least:
            raise ConfigError(f"data.{key}: found {value}, accepted are whole numbers from {least} on")
    try:
        pixels, labels = _patterns(images, classes, size)
    except (RuntimeError, OverflowError) as error:
        found = f"{images} images of {classes} classes and {size} pixels"
        raise ConfigError(
            f"data.images: found {found}, accepted are as many as there is memory for ({first_line(error)})"
        ) from error
    return array_dataset(
        "synthetic",
        classes,
        (pixels[:images], labels[:images]),
        (pixels[images:], labels[images:]),
        moments=channel_moments(pixels[:images]),
        flip=True,
    )


def _patterns(images: int, classes: int, size: int) -> tuple[Tensor, Tensor]:
    """Pixels and labels of both parts, those for training first."""
    generator = torch.Generator().manual_seed(0)
    # Patterns of 4x4 squares, mirror symmetric so that flips keep the class; noise fills the rest of the range.
    half = torch.randint(0, 192, (classes, 3, 4, 2), dtype=torch.uint8, generator=generator)
    places = torch.arange(size)
    patterns = half[:, :, places * 4 // size][..., torch.minimum(places, places.flip(0)) * 4 // size]
    labels = torch.arange(images + images // 4) % classes
    noise = torch.randint(0, 65, (len(labels), 3, size, size), dtype=torch.uint8, generator=generator)
    return noise.add_(patterns[labels]), labels
