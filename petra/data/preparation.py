"""Preparation of images for a network: centre crop and normalisation, as the test images of a data set are prepared."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import ExifTags, Image
from torch import Tensor

from petra.data.files import reading
from petra.errors import DataError, require

Moments = tuple[Sequence[Any], Sequence[float]]
"""Mean and standard deviation of each channel, for pixel values scaled to 0 ... 1. The mean may be an image (3, H, W)."""

TURNED = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""How an image is turned upright, by its EXIF orientation."""


@dataclass(frozen=True)
class Preparation:
    """How a data set prepares its test images. An exported file stores it beside the weights.

    Attributes:
        size: Side of the prepared images in pixels.
        moments: Mean and standard deviation, which normalise the pixels.
        crop: Side of the centre crop divided by the shorter side of the resized image.
        classes: Names of the classes, in the order of their numbers. Empty if the data set has none.
    """

    size: int
    moments: Moments
    crop: float = 1.0
    classes: tuple[str, ...] = ()

    def __call__(self, path: Path) -> Tensor:
        """Return the image in a file as a float32 tensor of shape (1, 3, size, size).

        Raises:
            DataError: If the file can't be read as a JPEG or PNG image.
        """
        pixels = decoded(path, lambda image: centre_crop(image, self.size, self.crop))
        return normalise(torch.from_numpy(pixels).permute(2, 0, 1)[None], self.moments)

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> Preparation:
        """Return the preparation of its attributes, as JSON has them. One of an earlier version with a mean image is refused."""
        require(values.get("mean_image") is None, "preparation", "a mean in moments; export the run again", "mean_image", DataError)
        return Preparation(values["size"], values["moments"], values["crop"], tuple(values.get("classes", ())))


def decoded(path: Path, crop: Callable[[Image.Image], Image.Image]) -> NDArray[np.uint8]:
    """Return a crop of the RGB image in a file, (H, W, 3), turned as its EXIF orientation says, as viewers show it.

    Raises:
        DataError: If the file can't be read as a JPEG or PNG image.
    """
    with _opened(path) as image:
        image.load()  # a PNG file may have its orientation behind its pixels
        turned = TURNED.get(orientation(image))
        return np.array(crop(as_rgb(image if turned is None else image.transpose(turned))))


def require_header(path: Path) -> None:
    """Check that a file begins as a JPEG or PNG image, without decoding it.

    Raises:
        DataError: If it does not.
    """
    with _opened(path):
        pass


@contextmanager
def _opened(path: Path) -> Iterator[Image.Image]:
    what = " as a JPEG or PNG image"
    with reading(path, "replace or remove the file", what), Image.open(path, formats=("JPEG", "PNG")) as image:
        yield image


def orientation(image: Image.Image) -> int:
    """Return the EXIF orientation of an image: 1 for none, and if its EXIF can't be read."""
    with suppress(Exception):  # Pillow raises many types for damaged EXIF, whose pixels are those of any image
        return int(image.getexif().get(ExifTags.Base.Orientation, 1))
    return 1


def as_rgb(image: Image.Image) -> Image.Image:
    """Return an image of a JPEG, PNG or WebP file as RGB with 8 bits per channel.

    Of 16-bit greyscale values, the upper 8 bits are kept. Pillow does so when it reads 16-bit colours, but clips greyscale at 255.
    """
    if image.mode.startswith("I"):  # I or I;16, depending on Pillow's version
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    return image.convert("RGB")


def normalise(images: Tensor, moments: Moments) -> Tensor:
    """Return uint8 images (B, 3, H, W) as float32, with the mean subtracted and divided by the standard deviation."""
    mean, std = (255 * torch.tensor(values) for values in moments)
    return images.float().sub_(mean if mean.dim() == 3 else mean[:, None, None]).div_(std[:, None, None])


def centre_crop(image: Image.Image, size: int, fraction: float) -> Image.Image:
    """Return the centre (size, size) of an image whose shorter side is first resized to size / ``fraction``."""
    shorter = round(size / fraction)
    width, height = (max(shorter, int(shorter * side / min(image.size))) for side in image.size)
    resized = image.resize((width, height), Image.Resampling.BILINEAR)
    left, top = round((width - size) / 2), round((height - size) / 2)
    return resized.crop((left, top, left + size, top + size))
