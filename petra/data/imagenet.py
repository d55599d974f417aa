"""ImageNet, or any other images, as JPEG files in one folder per class."""

from __future__ import annotations

import hashlib
import logging
import math
import os
import random
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from petra.data.dataset import Dataset, Split, labels_of
from petra.data.files import TOOLS, folder_of, folders_in, listed, require_all, require_distinct
from petra.data.preparation import Moments, Preparation, centre_crop, decoded, normalise, require_header
from petra.errors import DataError, alternatives, invalid, require
from petra.reversible import derive_seed

MOMENTS: Moments = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
CROP = 224 / 256
"""Side of the test crop divided by the shorter side of the resized image."""
EXTENSIONS = (".jpeg", ".jpg", ".png")
"""Extensions of image files, in lower case. The content determines the format: one of ImageNet's .JPEG files is a PNG file."""
LARGE = 100_000
"""Number of files whose headers take seconds."""
HELP = (
    "data.root is a folder with train/<class>/*.JPEG and val/<class>/*.JPEG: unpack ILSVRC2012_img_train.tar and "
    "ILSVRC2012_img_val.tar of https://image-net.org and move the validation images into a folder for each class"
)


def imagenet(root: str | Path | None = None, size: int = 224) -> Dataset:
    """Return the images in ``root``/train/<class> and ``root``/val/<class>. They are decoded when they are read.

    Classes are numbered in the order of their folders' names, which is the usual order for ImageNet. In training, a random crop of
    8 to 100 % of the image is resized (Szegedy et al. 2014, section 6) and flipped with probability 1/2. In evaluation, the shorter
    side is resized to 8/7 of ``size``, and the centre is cropped.

    Args:
        root: Folder with ``train`` and ``val``.
        size: Side of the resulting images in pixels.

    Raises:
        DataError: If ``root`` is None, folders are missing, empty or differ between train and val, or have the same images, or a
            file does not begin as an image.
    """
    folder = folder_of(root, "imagenet", HELP)
    classes, test_classes = _classes(folder / "train"), _classes(folder / "val")
    if different := sorted(set(classes) ^ set(test_classes)):
        got = f"{different[0]} in one of them only; {HELP}"
        raise invalid(str(folder), "the same classes in train and val", got, DataError)
    train, test = (_split(folder / part, classes, size) for part in ("train", "val"))
    for name in classes[:16]:
        last = listed(folder / "val" / name, HELP)[-1]
        require_distinct(path for part in ("train", "val") if (path := folder / part / name / last).is_file())
    return Dataset("imagenet", len(classes), size, train, test, None, " ".join(classes), Preparation(size, MOMENTS, CROP, classes))


def _classes(folder: Path) -> tuple[str, ...]:
    classes = tuple(folders_in(folder, HELP))
    require(len(classes) >= 2, str(folder), "at least 2 folders of classes", f"{len(classes)}; {HELP}", DataError)
    return classes


def _split(folder: Path, classes: tuple[str, ...], size: int) -> Split:
    names, labels = list[bytes](), list[int]()
    others = {*listed(folder, HELP)} - {*classes} - TOOLS
    for number, name in enumerate(classes):
        found = listed(folder / name, HELP)
        files = [file for file in found if file.lower().endswith(EXTENSIONS)]
        others |= {f"{name}/{file}" for file in {*found} - {*files}}
        require(len(files) > 0, str(folder / name), f"files that end in {alternatives(EXTENSIONS)}", f"none; {HELP}", DataError)
        names += sorted(os.fsencode(f"{name}/{file}") for file in files)
        labels += [number] * len(files)
    if others:
        logging.getLogger(__name__).warning("%s: left out %d, such as %s", folder, len(others), min(others))
    require_images(folder, classes, names)
    images = ImageFiles(folder, np.array(names), size)
    return Split(len(names), images, partial(labels_of, torch.tensor(labels, dtype=torch.int32)), epoch_seed=True)


def require_images(folder: Path, classes: Sequence[str], names: Sequence[bytes]) -> None:
    """Check the headers of all files, a million of which take a minute on a local disk.

    More than :data:`LARGE` are checked once, as long as the times of their folders don't change: a file in the user's cache tells.

    Raises:
        DataError: If some are no images.
    """
    facts = str(folder), len(names), *((folder / name).stat().st_mtime_ns for name in classes)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "petra")
    known = cache / f"images_{hashlib.sha256(repr(facts).encode()).hexdigest()[:32]}"
    if len(names) > LARGE and known.exists():
        return
    require_all(lambda name: require_header(folder / os.fsdecode(name)), names)
    if len(names) > LARGE and cache.is_absolute():
        with suppress(OSError):  # a cache that can't be written costs time only
            cache.mkdir(parents=True, exist_ok=True)
            known.touch()


@dataclass(frozen=True, eq=False)
class ImageFiles:
    """Reader of inputs from image files.

    Attributes:
        folder: Folder of the files.
        names: Path of each file in the folder, encoded as bytes. One array, because worker processes would copy each of a million
            Python objects when they access it.
        size: Side of the decoded images in pixels.
    """

    folder: Path
    names: NDArray[np.bytes_]
    size: int

    def __call__(self, indices: Tensor, seed: int | None) -> Tensor:
        """Return normalised images (B, 3, size, size), augmented if a seed is given.

        Raises:
            DataError: If a file can't be decoded.
        """
        pixels = np.empty((len(indices), self.size, self.size, 3), np.uint8)
        for row, index in zip(pixels, indices.tolist(), strict=True):
            rng = None if seed is None else random.Random(derive_seed(seed, index))
            row[:] = cropped(self.folder / os.fsdecode(self.names[index]), self.size, rng)
        return normalise(torch.from_numpy(pixels).permute(0, 3, 1, 2), MOMENTS)


def cropped(path: Path, size: int, rng: random.Random | None) -> NDArray[np.uint8]:
    """Decode an image file to an RGB crop (size, size, 3).

    Args:
        path: Path of the file.
        size: Side of the crop in pixels.
        rng: Random numbers for a random crop and flip, or None for the centre.

    Raises:
        DataError: If the file can't be decoded.
    """

    def crop(image: Image.Image) -> Image.Image:
        if rng is None:
            return centre_crop(image, size, CROP)
        part = image.crop(random_box(*image.size, rng)).resize((size, size), Image.Resampling.BILINEAR)
        return part.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if rng.random() < 0.5 else part

    return decoded(path, crop)


def random_box(width: int, height: int, rng: random.Random) -> tuple[int, int, int, int]:
    """Return a random crop with 8 to 100 % of the image's area and an aspect ratio from 3/4 to 4/3.

    If ten random sizes in a row don't fit into the image, return the largest centred crop with an aspect ratio in this range.

    Args:
        width, height: Size of the image in pixels.
        rng: Random numbers.

    Returns:
        Left, upper, right and lower edge in pixels. The right and the lower edge are exclusive.
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
