"""ImageNet, or any photographs, as JPEG files in a folder for each class."""

from __future__ import annotations

import math
import os
import random
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from petra.data.arrays import Moments, normalise
from petra.data.dataset import Dataset, Labels, Split
from petra.data.files import folder_of
from petra.errors import DataError
from petra.reversible import derive_seed

MOMENTS: Moments = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
ENDINGS = (".jpeg", ".jpg", ".png")  # one of ImageNet's JPEG files is a PNG file, so the content decides
HELP = (
    "data.root is a folder with train/<class>/*.JPEG and val/<class>/*.JPEG: unpack ILSVRC2012_img_train.tar and "
    "ILSVRC2012_img_val.tar of https://image-net.org and move the validation images into a folder for each class"
)
Box = tuple[int, int, int, int]
"""Left, upper, right and lower edge in pixels; the last two just outside."""


def imagenet(root: str | Path | None = None, size: int = 224) -> Dataset:
    """Photographs in ``root``/train/<class> and ``root``/val/<class>, decoded as they are asked for, ``size`` x ``size`` pixels.

    Classes are numbered in the order of their folders' names, which for ImageNet's is the usual one. In training a random part of
    the image is resized and mirrored or not (Szegedy et al. 2014, section 6); in evaluation the shorter side becomes 8/7 of
    ``size`` and the centre is cut out.

    Raises :class:`petra.errors.DataError` for a root that isn't given and for folders that are missing, empty or don't match.
    """
    folder = folder_of(root, "imagenet", HELP)
    classes, test_classes = _classes(folder / "train"), _classes(folder / "val")
    if classes != test_classes:
        different = sorted(set(classes) ^ set(test_classes))
        raise DataError(f"{folder}: train and val have different classes, such as {different[0]}; {HELP}")
    train, test = (_split(folder / name, classes, size) for name in ("train", "val"))
    return Dataset("imagenet", len(classes), size, train, test)


def _classes(folder: Path) -> tuple[str, ...]:
    try:
        with os.scandir(folder) as entries:
            found = tuple(sorted(entry.name for entry in entries if entry.is_dir()))
    except OSError as error:
        raise DataError(f"{folder}: can't be read ({error.strerror}); {HELP}") from error
    if len(found) < 2:
        raise DataError(f"{folder}: found {len(found)} folder(s) of classes, accepted are 2 or more; {HELP}")
    return found


def _split(folder: Path, classes: tuple[str, ...], size: int) -> Split:
    names: list[bytes] = []
    counts: list[int] = []
    for name in classes:
        try:
            files = sorted(os.fsencode(file) for file in os.listdir(folder / name) if file.lower().endswith(ENDINGS))
        except OSError as error:
            raise DataError(f"{folder / name}: can't be read ({error.strerror}); {HELP}") from error
        if not files:
            raise DataError(f"{folder / name}: found no file that ends in {', '.join(ENDINGS)}; {HELP}")
        names += files
        counts.append(len(files))
    labels = np.repeat(np.arange(len(classes), dtype=np.int16), counts)
    photographs = Photographs(folder, classes, np.array(names), labels, size)
    return Split(len(names), photographs, Labels(torch.from_numpy(labels)), apart=True)


@dataclass(frozen=True, eq=False)
class Photographs:
    """Reader of inputs: files decoded to ``size`` x ``size`` pixels.

    The names stand in one array: a million objects would each be copied into every worker process once it looked at them.

    Raises :class:`petra.errors.DataError` for a file that can't be read.
    """

    folder: Path
    classes: tuple[str, ...]
    names: NDArray[np.bytes_]
    labels: NDArray[np.int16]
    size: int

    def __call__(self, indices: Tensor, seed: int | None) -> Tensor:
        pixels = np.empty((len(indices), self.size, self.size, 3), np.uint8)
        for row, index in zip(pixels, indices.tolist(), strict=True):
            rng = None if seed is None else random.Random(derive_seed(seed, index))
            row[:] = decoded(self.folder / self.classes[self.labels[index]] / os.fsdecode(self.names[index]), self.size, rng)
        return normalise(torch.from_numpy(pixels).permute(0, 3, 1, 2), MOMENTS)


def decoded(path: Path, size: int, rng: random.Random | None) -> NDArray[np.uint8]:
    """An image file as RGB (``size``, ``size``, 3): a random part, mirrored or not, or the centre without ``rng``."""
    try:
        with Image.open(path, formats=("JPEG", "PNG")) as image:
            colours = image.convert("RGB")
            part = _centre(colours, size) if rng is None else _random_part(colours, size, rng)
    except Exception as error:  # decoders raise many, and their list is nowhere
        text = error.strerror if isinstance(error, OSError) and error.strerror else str(error) or type(error).__name__
        raise DataError(f"{path}: can't be read as a JPEG or PNG image ({text}); replace this file, or remove it") from error
    return np.asarray(part)


def _centre(image: Image.Image, size: int) -> Image.Image:
    shorter = round(size * 256 / 224)
    width, height = (max(shorter, int(shorter * side / min(image.size))) for side in image.size)
    left, top = (round((side - size) / 2) for side in (width, height))
    return image.resize((width, height), Image.Resampling.BILINEAR).crop((left, top, left + size, top + size))


def _random_part(image: Image.Image, size: int, rng: random.Random) -> Image.Image:
    part = image.crop(random_box(*image.size, rng)).resize((size, size), Image.Resampling.BILINEAR)
    return part.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if rng.random() < 0.5 else part


def random_box(width: int, height: int, rng: random.Random) -> Box:
    """A part of 8 to 100 % of an image's area and an aspect ratio from 3/4 to 4/3, anywhere in it.

    Ten parts are tried that may be larger than the image; then it is the largest one in the centre whose ratio is in that range.
    """
    for _ in range(10):
        area = width * height * rng.uniform(0.08, 1)
        ratio = math.exp(rng.uniform(math.log(3 / 4), math.log(4 / 3)))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            left, top = rng.randint(0, width - w), rng.randint(0, height - h)
            return left, top, left + w, top + h
    w, h = min(width, max(1, round(height * 4 / 3))), min(height, max(1, round(width * 4 / 3)))
    left, top = (width - w) // 2, (height - h) // 2
    return left, top, left + w, top + h
