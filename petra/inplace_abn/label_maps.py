"""Images with a class for each pixel, read from pairs of files: an image, and a label file of the same size."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from petra.data.files import reading
from petra.data.imagenet import MOMENTS
from petra.data.preparation import as_rgb, normalise, orientation
from petra.errors import DataError, invalid, require
from petra.inplace_abn.crops import Classes, Pixels, Size, Tile, Window, cut_image, cut_labels, random_pixel, random_window
from petra.reversible import derive_seed
from petra.specs import IGNORED

FORMATS = ("JPEG", "PNG", "WEBP")
"""Image formats that can be read."""
HELP, LABELS = "replace or remove the file", " as labels in a PNG file"
OUT_OF_RANGE = IGNORED - 1
"""Class of values that may not occur."""
Used = TypeVar("Used")


class Pair(NamedTuple):
    """Paths of an image and of its labels."""

    image: Path
    labels: Path


@dataclass(frozen=True)
class LabelValues:
    """Meaning of the values in a label file.

    Attributes:
        known: Class 0, 1, ... of each value that has one.
        ignored: Values to ignore, if they have no class.
        expected: Describes both.
    """

    known: dict[int, int]
    ignored: Sequence[int]
    expected: str

    def read(self, path: Path) -> Classes:
        """Return the class of each pixel, (H, W), -100 where it is ignored.

        Raises:
            DataError: If the file can't be decoded, has no palette and not one 8-bit channel, or has a value that may not occur.
        """
        with reading(path, HELP, LABELS), Image.open(path, formats=("PNG",)) as image, path.open("rb") as file:
            mode, values = image.mode, np.asarray(image)
            depth = file.read(25)[24]  # bits per channel, after width and height in the header (PNG, 11.2.1)
        if mode not in ("L", "P") or values.dtype != np.uint8:
            raise invalid(str(path), "labels in one channel of 8 bits (PNG mode L or P)", f"mode {mode}", DataError)
        if mode == "L" and depth != 8:  # Pillow multiplies the values so that white is 255
            raise invalid(str(path), "labels in one channel of 8 bits, or in a palette", f"greyscale of {depth} bits", DataError)
        meaning = dict.fromkeys(self.ignored, IGNORED) | self.known
        classes: Classes = np.array([meaning.get(value, OUT_OF_RANGE) for value in range(256)], np.int16)[values]
        wrong = values[classes == OUT_OF_RANGE]
        if len(wrong):
            got = ", ".join(map(str, np.unique(wrong)[:5]))
            raise invalid(str(path), f"labels {self.expected}", got, DataError)
        return classes


def read_image(path: Path) -> Image.Image:
    """Return an image file as RGB.

    Raises:
        DataError: If it can't be decoded.
    """
    return _opened(path, as_rgb)


def size_of(path: Path) -> Size:
    """Return width and height of an image file from its header.

    Raises:
        DataError: If the file can't be read.
    """
    return _opened(path, lambda image: image.size)


def _opened(path: Path, use: Callable[[Image.Image], Used]) -> Used:
    with reading(path, HELP, " as a JPEG, PNG or WebP image"), Image.open(path, formats=FORMATS) as image:
        turned = orientation(image)
        require(turned == 1, str(path), "an image without an EXIF orientation, as its labels have none", turned, DataError)
        return use(image)


@dataclass(frozen=True, eq=False)
class Files:
    """Pairs of files of one split, and how they are read.

    Attributes:
        pairs: Images and labels, in order.
        values: Meaning of the values in label files.
        size: Width and height of a sample.
        classes: Number of classes.
    """

    pairs: Sequence[Pair]
    values: LabelValues
    size: Size
    classes: int

    def sample(self, index: int) -> SampleIndex:
        """Return what the index of a training sample means."""
        return SampleIndex.decode(index, len(self.pairs), self.classes)

    def read_labels(self, index: int) -> Classes:
        """Return the labels of an image, (H, W).

        Raises:
            DataError: If they can't be used, or do not have the image's size.
        """
        pair = self.pairs[index]
        labels = self.values.read(pair.labels)
        rows, columns = labels.shape
        require_size(pair, size_of(pair.image), (columns, rows))
        return labels


def require_headers(pair: Pair) -> None:
    """Check that the files of a pair begin as images of the same size, without decoding them.

    Raises:
        DataError: If they do not.
    """
    size = size_of(pair.image)
    with reading(pair.labels, HELP, LABELS), Image.open(pair.labels, formats=("PNG",)) as labels:
        require_size(pair, size, labels.size)


def require_size(pair: Pair, image: Size, labels: Size) -> None:
    """Raise a DataError if the labels of a pair do not have the size of the image."""
    expected = f"labels of {image[0]}x{image[1]} pixels, the size of {pair.image.name}"
    require(image == labels, str(pair.labels), expected, f"{labels[0]}x{labels[1]}", DataError)


class SampleIndex(NamedTuple):
    """What the index of a training sample means.

    Attributes:
        image: Number of the image.
        shown: Class that the sample must show, or None.
        place: Number of the sample in its epoch, so that repetitions of an image differ. 0 if images don't repeat.
    """

    image: int
    shown: int | None = None
    place: int = 0

    def encode(self, images: int, classes: int) -> int:
        """Return the index, for the given numbers of images and classes. It is the image's number if nothing else is set."""
        shown = 0 if self.shown is None else self.shown + 1
        return (self.place * (classes + 1) + shown) * images + self.image

    @staticmethod
    def decode(index: int, images: int, classes: int) -> SampleIndex:
        """Return what an index means."""
        rest, image = divmod(index, images)
        place, shown = divmod(rest, classes + 1)
        return SampleIndex(image, shown - 1 if shown else None, place)


@dataclass(frozen=True, eq=False)
class TrainingSamples:
    """Reader of random windows of training images. Images and labels are read
    separately, as in different processes, and show the same.

    Attributes:
        files: The files. The index of a sample is a :class:`SampleIndex`.
    """

    files: Files

    def __call__(self, indices: Tensor, seed: int | None) -> Tensor:
        """Return normalised float32 images (B, 3, H, W). Without a seed, windows show the centre.

        Raises:
            DataError: If a file can't be used.
        """
        windows = []
        for index in indices.tolist():
            sample = self.files.sample(index)
            image = read_image(self.files.pairs[sample.image].image)
            labels = None if sample.shown is None else self.files.read_labels(sample.image)
            windows.append(cut_image(image, self._window(index, image.size, labels, seed), self.files.size))
        return _as_images(windows)

    def labels(self, indices: Tensor, seed: int | None) -> Tensor:
        """Return int64 targets (B, H, W). Arguments and errors as for the images."""
        windows = []
        for index in indices.tolist():
            labels = self.files.read_labels(self.files.sample(index).image)
            rows, columns = labels.shape
            windows.append(cut_labels(labels, self._window(index, (columns, rows), labels, seed), self.files.size))
        return _as_targets(windows)

    def _window(self, index: int, whole: Size, labels: Classes | None, seed: int | None) -> Window:
        """Return the window of a sample. ``labels`` may be None if the sample need not show a class."""
        size = self.files.size
        if seed is None:
            return Window((whole[0] - size[0]) // 2, (whole[1] - size[1]) // 2)
        rng, shown = random.Random(derive_seed(seed, index)), self.files.sample(index).shown
        pixel = None if shown is None or labels is None else random_pixel(labels, shown, rng)
        return random_window(whole, size, rng, pixel)


@dataclass(frozen=True, eq=False)
class TileSamples:
    """Reader of tiles of test images.

    Attributes:
        files: The files.
        tiles: All tiles, image by image.
    """

    files: Files
    tiles: Sequence[Tile]

    def __call__(self, indices: Tensor, seed: int | None) -> Tensor:
        """Return normalised float32 images (B, 3, H, W).

        Raises:
            DataError: If a file can't be used.
        """
        read = lru_cache(maxsize=1)(read_image)  # consecutive tiles show the same image
        found = (self.tiles[index] for index in indices.tolist())
        return _as_images(
            [cut_image(read(self.files.pairs[tile.image].image), Window(tile.left, tile.top), self.files.size) for tile in found]
        )

    def labels(self, indices: Tensor, seed: int | None) -> Tensor:
        """Return int64 targets (B, H, W), -100 where another tile counts the pixel. Errors as for the images."""
        read = lru_cache(maxsize=1)(self.files.read_labels)
        found = []
        for tile in (self.tiles[index] for index in indices.tolist()):
            labels = cut_labels(read(tile.image), Window(tile.left, tile.top), self.files.size)
            x0, y0, x1, y1 = tile.counted
            counted = np.full_like(labels, IGNORED)
            counted[y0:y1, x0:x1] = labels[y0:y1, x0:x1]
            found.append(counted)
        return _as_targets(found)


def _as_images(windows: Sequence[Pixels]) -> Tensor:
    return normalise(torch.from_numpy(np.stack(windows)).permute(0, 3, 1, 2), MOMENTS)


def _as_targets(windows: Sequence[Classes]) -> Tensor:
    return torch.from_numpy(np.stack(windows)).long()
