"""Data sets without files: scikit-learn's digits, and synthetic patterns of any size."""

from __future__ import annotations

from typing import Annotated

import torch

from petra.data.arrays import array_dataset
from petra.data.dataset import Dataset
from petra.errors import first_line, invalid, require


def digits() -> Dataset:
    """Return scikit-learn's 8x8 handwritten digits, enlarged to 32x32 pixels: 1,437 training and 360 test images."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    # The interpolation computes sums of sixteenths and 64ths, which are exact in float32, so results are the same on every machine.
    pixels = torch.from_numpy(bunch.images).float()[:, None]
    enlarged = torch.nn.functional.interpolate(pixels, size=(32, 32), mode="bilinear", align_corners=False)
    images = (enlarged * (255 / 16)).round().to(torch.uint8).repeat(1, 3, 1, 1)
    labels = torch.from_numpy(bunch.target).long()
    # Every fifth image in the order of labels, so the test set gets a fifth of each class.
    test = torch.zeros(len(labels), dtype=torch.bool)
    test[labels.argsort(stable=True)[::5]] = True
    return array_dataset("digits", 10, (images[~test], labels[~test]), (images[test], labels[test]), flip=False)


def synthetic(images: Annotated[int, ">= 4"] = 1024, classes: int = 10, size: int = 32) -> Dataset:
    """Return images of one pattern per class with noise.

    Args:
        images: Number of training images. There are a quarter as many test images.
        classes: Number of classes.
        size: Side of an image in pixels.

    Raises:
        ConfigError: If a number is too small, or the images don't fit into memory.
    """
    for key, value, least in (("classes", classes, 2), ("images", images, 4), ("size", size, 4)):
        require(value >= least, f"data.{key}", f"an integer >= {least}", value)
    try:
        generator = torch.Generator().manual_seed(0)
        # Patterns of 4x4 squares, symmetric so that flips keep the class. Noise takes the rest of the range.
        half = torch.randint(0, 192, (classes, 3, 4, 2), dtype=torch.uint8, generator=generator)
        positions = torch.arange(size)
        patterns = half[:, :, positions * 4 // size][..., torch.minimum(positions, positions.flip(0)) * 4 // size]
        labels = torch.arange(images + images // 4) % classes
        pixels = torch.randint(0, 65, (len(labels), 3, size, size), dtype=torch.uint8, generator=generator)
        pixels += patterns[labels]
    except (RuntimeError, OverflowError) as error:
        got = f"{images} images of {classes} classes and {size}x{size} pixels ({first_line(error)})"
        raise invalid("data.images", "a number of images that fits into memory", got) from error
    return array_dataset("synthetic", classes, (pixels[:images], labels[:images]), (pixels[images:], labels[images:]))
