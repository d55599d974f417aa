"""Preparation of images for a network: centre crop and normalisation, as the test images of a data set are prepared."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from petra.errors import DataError

Moments = tuple[tuple[float, ...], tuple[float, ...]]
"""Mean and standard deviation of each channel, for pixel values scaled to 0 ... 1."""


@dataclass(frozen=True)
class Preparation:
    """How a data set prepares its test images. An exported file stores it beside the weights.

    Attributes:
        size: Side of the prepared images in pixels.
        moments: Mean and standard deviation of each channel, which normalise the pixels.
        crop: Side of the centre crop divided by the shorter side of the resized image.
        mean_image: Mean of the training images, which is subtracted instead of normalising channels: the bytes of its float32
            pixel values (3, size, size) in base64. None if the data set normalises channels.
        classes: Names of the classes, in the order of their numbers. Empty if the data set has none.
    """

    size: int
    moments: Moments
    crop: float = 1.0
    mean_image: str | None = None
    classes: tuple[str, ...] = ()

    def __call__(self, path: Path) -> Tensor:
        """Return the image in a file as a float32 tensor (1, 3, size, size).

        Raises:
            DataError: If the file can't be read as a JPEG or PNG image.
        """
        try:
            with Image.open(path, formats=("JPEG", "PNG")) as image:
                pixels = np.array(centre_crop(as_rgb(image), self.size, self.crop))
        except Exception as error:
            raise unreadable(path, error) from error
        images = torch.from_numpy(pixels).permute(2, 0, 1)[None]
        if self.mean_image is None:
            return normalise(images, self.moments)
        mean = torch.frombuffer(bytearray(base64.b64decode(self.mean_image)), dtype=torch.float32)
        return centre(images, mean.view(3, self.size, self.size))

    def as_dict(self) -> dict[str, Any]:
        """Return the attributes as values that JSON can represent."""
        return asdict(self)

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> Preparation:
        """Return the preparation of an :meth:`as_dict`."""
        mean, std = values["moments"]
        moments, classes = (tuple(mean), tuple(std)), tuple(values.get("classes", ()))
        return Preparation(int(values["size"]), moments, float(values["crop"]), values.get("mean_image"), classes)


def as_rgb(image: Image.Image) -> Image.Image:
    """Return an image of a JPEG, PNG or WebP file as RGB with 8 bits per channel.

    Of 16-bit greyscale values, the upper 8 bits are kept. Pillow does so when it reads 16-bit colours, but clips greyscale at 255.
    """
    if image.mode.startswith("I"):  # I or I;16, depending on Pillow's version
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    return image.convert("RGB")


def normalise(images: Tensor, moments: Moments) -> Tensor:
    """Return uint8 images (B, 3, H, W) as float32, with the mean subtracted and divided by the standard deviation."""
    mean, std = (255 * torch.tensor(values).view(-1, 1, 1) for values in moments)
    return images.float().sub_(mean).div_(std)


def centre(images: Tensor, mean_image: Tensor) -> Tensor:
    """Return uint8 images (B, 3, H, W) with the mean image (3, H, W) subtracted, as float32 multiples of 255."""
    return (images - mean_image).div_(255)


def encoded(mean_image: Tensor) -> str:
    """Return the bytes of a float32 mean image (3, H, W) in base64, for :class:`Preparation`."""
    return base64.b64encode(mean_image.numpy().tobytes()).decode()


def centre_crop(image: Image.Image, size: int, fraction: float) -> Image.Image:
    """Return the centre (size, size) of an image whose shorter side is first resized to size / ``fraction``."""
    resized = resize_shorter_side(image, size, fraction)
    left, top = (round((side - size) / 2) for side in resized.size)
    return resized.crop((left, top, left + size, top + size))


def resize_shorter_side(image: Image.Image, size: int, fraction: float) -> Image.Image:
    """Return an image whose shorter side is resized to size / ``fraction``."""
    shorter = round(size / fraction)
    width, height = (max(shorter, int(shorter * side / min(image.size))) for side in image.size)
    return image.resize((width, height), Image.Resampling.BILINEAR)


def unreadable(path: Path, error: Exception) -> DataError:
    """Return the error for an image file that can't be decoded. Decoders raise exceptions of many undocumented types."""
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error) or type(error).__name__
    return DataError(f"{path}: can't be read as a JPEG or PNG image ({reason}); replace or remove the file")
