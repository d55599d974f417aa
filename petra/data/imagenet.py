"""ImageNet, or any other images, as JPEG files in one folder per class."""

from __future__ import annotations

import math
import os
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from petra.data.dataset import Dataset, Labels, Split
from petra.data.files import folder_of, listed
from petra.data.preparation import Moments, Preparation, as_rgb, centre_crop, normalise, resize_shorter_side, unreadable
from petra.errors import DataError, alternatives, invalid, require
from petra.reversible import derive_seed
from petra.specs import IGNORED

MOMENTS: Moments = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
CROPS = ("area", "shorter_side")
COMPONENTS = np.array([[-0.5675, 0.7192, 0.4009], [-0.5808, -0.0045, -0.8140], [-0.5836, -0.6948, 0.4203]], np.float32)
"""Principal components of the colours of ImageNet's pixels, in columns."""
VARIANCES = np.array([0.2175, 0.0188, 0.0045], np.float32)
"""Variances of the principal components."""
CROP = 224 / 256
"""Side of the test crop divided by the shorter side of the resized image."""
EXTENSIONS = (".jpeg", ".jpg", ".png")
"""Extensions of image files, in lower case. The content determines the format: one of ImageNet's .JPEG files is a PNG file."""
HELP = (
    "data.root is a folder with train/<class>/*.JPEG and val/<class>/*.JPEG: unpack ILSVRC2012_img_train.tar and "
    "ILSVRC2012_img_val.tar of https://image-net.org and move the validation images into a folder for each class"
)
Box = tuple[int, int, int, int]
"""Left, upper, right and lower edge of a crop, in pixels. Right and lower edge are exclusive."""


def imagenet(
    root: str | Path | None = None, size: int = 224, distort: bool = False, crop: str = "area", jitter: bool = False, crops: int = 1
) -> Dataset:
    """Return the images in ``root``/train/<class> and ``root``/val/<class>. They are decoded when they are read.

    Classes are numbered in the order of their folders' names, which is the usual order for ImageNet. In training, a random crop is
    flipped with probability 1/2. In evaluation, the shorter side is resized to 8/7 of ``size``, and the centre is cropped.

    Args:
        root: Folder with ``train`` and ``val``.
        size: Side of the resulting images in pixels.
        distort: Whether training distorts colours (:func:`distorted`).
        crop: Random crops of training. ``area``: 8 to 100 % of the image, resized (Szegedy et al. 2014, section 6).
            ``shorter_side``: as in evaluation, but from a random position (Rota Bulò et al. 2018, section 4.1).
        jitter: Whether training changes colours (:func:`jittered`).
        crops: 1; or 10 for the test images: corners, centre, and their mirror images (Krizhevsky et al. 2012, section 4.1). A test
            image then has ten consecutive samples, of which the first has its class, and the others have the target -100.

    Raises:
        ConfigError: If a value is not accepted.
        DataError: If ``root`` is None, or if folders are missing, empty or differ between train and val.
    """
    folder = folder_of(root, "imagenet", HELP)
    require(crop in CROPS, "data.crop", alternatives(CROPS), crop)
    require(crops in (1, 10), "data.crops", "1 or 10", crops)
    classes, test_classes = _classes(folder / "train"), _classes(folder / "val")
    if classes != test_classes:
        different = sorted(set(classes) ^ set(test_classes))
        got = f"{different[0]} in one of them only; {HELP}"
        raise invalid(str(folder), "the same classes in train and val", got, DataError)
    augmented = partial(ImageFiles, size=size, distort=distort, shorter_side=crop != "area", jitter=jitter)
    train = _split(folder / "train", classes, augmented)
    test = _split(folder / "val", classes, partial(ImageFiles, size=size, crops=crops), crops)
    return Dataset("imagenet", len(classes), size, train, test, preparation=Preparation(size, MOMENTS, CROP, classes=classes))


def _classes(folder: Path) -> tuple[str, ...]:
    classes = tuple(name for name in listed(folder, HELP) if (folder / name).is_dir())
    require(len(classes) >= 2, str(folder), "at least 2 folders of classes", f"{len(classes)}; {HELP}", DataError)
    return classes


def _split(folder: Path, classes: tuple[str, ...], reader: Callable[..., ImageFiles], crops: int = 1) -> Split:
    names: list[bytes] = []
    counts: list[int] = []
    for name in classes:
        files = sorted(os.fsencode(file) for file in listed(folder / name, HELP) if file.lower().endswith(EXTENSIONS))
        expected = f"files that end in {alternatives(EXTENSIONS)}"
        require(len(files) > 0, str(folder / name), expected, f"none; {HELP}", DataError)
        names += files
        counts.append(len(files))
    labels = np.repeat(np.arange(len(classes), dtype=np.int16), counts)
    images = reader(folder, classes, np.array(names), labels)
    targets = torch.full((len(names), crops), IGNORED, dtype=torch.int16)
    targets[:, 0] = torch.from_numpy(labels)
    return Split(crops * len(names), images, Labels(targets.flatten()), epoch_seed=True)


@dataclass(frozen=True, eq=False)
class ImageFiles:
    """Reader of inputs from image files.

    File names are in one array, because worker processes would copy each of a million Python objects when they access it.

    Attributes:
        folder: Folder that contains the folders of the classes.
        classes: Folder name of each class.
        names: File name of each image, encoded as bytes.
        labels: Class of each image.
        size: Side of the decoded images in pixels.
        distort: Whether augmentation distorts colours.
        shorter_side: Whether random crops are of the resized image, as the centre crop is.
        jitter: Whether augmentation changes colours.
        crops: Number of crops of an image, 1 or 10. Sample i shows crop i mod ``crops`` of image i // ``crops``.
    """

    folder: Path
    classes: tuple[str, ...]
    names: NDArray[np.bytes_]
    labels: NDArray[np.int16]
    size: int
    distort: bool = False
    shorter_side: bool = False
    jitter: bool = False
    crops: int = 1

    def __call__(self, indices: Tensor, seed: int | None) -> Tensor:
        """Return normalised images (B, 3, size, size), augmented if a seed is given.

        Raises:
            DataError: If a file can't be decoded.
        """
        pixels = np.empty((len(indices), self.size, self.size, 3), np.uint8)
        for row, sample in zip(pixels, indices.tolist(), strict=True):
            rng = None if seed is None else random.Random(derive_seed(seed, sample))
            index, part = divmod(sample, self.crops)
            path = self.folder / self.classes[self.labels[index]] / os.fsdecode(self.names[index])
            row[:] = decoded(path, self.size, rng, shorter_side=self.shorter_side, part=part if self.crops > 1 else None)
            if rng is not None and self.distort:
                row[:] = distorted(row, rng)
            if rng is not None and self.jitter:
                row[:] = jittered(row, rng)
        return normalise(torch.from_numpy(pixels).permute(0, 3, 1, 2), MOMENTS)


def decoded(
    path: Path, size: int, rng: random.Random | None, *, shorter_side: bool = False, part: int | None = None
) -> NDArray[np.uint8]:
    """Decode an image file to an RGB crop (size, size, 3).

    Args:
        path: Path of the file.
        size: Side of the crop in pixels.
        rng: Random numbers for a random crop and flip, or None for the centre.
        shorter_side: Whether a random crop is of the image whose shorter side is resized, as for the centre.
        part: Number of one of ten crops (:func:`one_of_ten`) instead of the centre.

    Raises:
        DataError: If the file can't be decoded.
    """
    try:
        with Image.open(path, formats=("JPEG", "PNG")) as image:
            rgb = as_rgb(image)
            if part is not None:
                crop = one_of_ten(rgb, size, part)
            elif rng is None:
                crop = centre_crop(rgb, size, CROP)
            else:
                crop = _flipped((_random_position if shorter_side else _random_area)(rgb, size, rng), rng)
    except Exception as error:
        raise unreadable(path, error) from error
    return np.asarray(crop)


def distorted(image: NDArray[np.uint8], rng: random.Random) -> NDArray[np.uint8]:
    """Change brightness, saturation, hue and contrast of an RGB image (H, W, 3) at random, in this order.

    The ranges are those of the Inception networks (Szegedy et al. 2015, as published with TensorFlow), which RevNet uses (appendix
    7.1): brightness by up to 32 levels of 255, saturation and contrast by a factor from 0.5 to 1.5, hue by up to 0.2 of the circle.
    """
    pixels = image.astype(np.float32) + rng.uniform(-32, 32)
    grey = pixels @ np.array((0.299, 0.587, 0.114), np.float32)
    pixels = grey[..., None] + rng.uniform(0.5, 1.5) * (pixels - grey[..., None])
    hsv = np.array(Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8)).convert("HSV"))
    hsv[..., 0] += np.uint8(round(256 * rng.uniform(-0.2, 0.2)) % 256)  # hue is a circle, so the sum may wrap around
    turned = Image.frombytes("HSV", (image.shape[1], image.shape[0]), hsv.tobytes())
    pixels = np.asarray(turned.convert("RGB")).astype(np.float32)
    means = pixels.mean((0, 1))
    contrasted: NDArray[np.uint8] = np.clip(means + rng.uniform(0.5, 1.5) * (pixels - means), 0, 255).astype(np.uint8)
    return contrasted


def jittered(image: NDArray[np.uint8], rng: random.Random) -> NDArray[np.uint8]:
    """Change brightness, contrast and saturation of an RGB image (H, W, 3), in random order, and then its lighting.

    Brightness, contrast and saturation are multiplied by 0.6 to 1.4, as in the authors' code of ResNeXt (Xie et al. 2017). Lighting
    adds multiples of the principal components of ImageNet's colours, which are normal with standard deviation 0.1 (Krizhevsky et
    al. 2012, section 4.1).
    """
    pixels: NDArray[np.float32] = (image / 255).astype(np.float32)
    for kind in rng.sample(("brightness", "contrast", "saturation"), 3):
        factor, other = np.float32(rng.uniform(0.6, 1.4)), np.zeros(1, np.float32)
        if kind != "brightness":
            grey = (pixels @ np.array((0.299, 0.587, 0.114), np.float32))[..., None]
            other = grey if kind == "saturation" else grey.mean(keepdims=True)
        pixels = (factor * pixels + (1 - factor) * other).astype(np.float32)
    shift = COMPONENTS @ (VARIANCES * np.array([rng.gauss(0, 0.1) for _ in range(3)], np.float32))
    found: NDArray[np.uint8] = np.clip(255 * (pixels + shift) + 0.5, 0, 255).astype(np.uint8)
    return found


def one_of_ten(image: Image.Image, size: int, part: int) -> Image.Image:
    """Return one of ten crops (size, size) of an image whose shorter side is first resized to 8/7 of ``size``.

    Args:
        image: RGB image.
        size: Side of the crop in pixels.
        part: 0 to 3: corners; 4: centre; 5 to 9: their mirror images.
    """
    resized = resize_shorter_side(image, size, CROP)
    right, bottom = resized.width - size, resized.height - size
    left, top = ((0, 0), (right, 0), (0, bottom), (right, bottom), (round(right / 2), round(bottom / 2)))[part % 5]
    crop = resized.crop((left, top, left + size, top + size))
    return crop if part < 5 else crop.transpose(Image.Transpose.FLIP_LEFT_RIGHT)


def _random_area(image: Image.Image, size: int, rng: random.Random) -> Image.Image:
    return image.crop(random_box(*image.size, rng)).resize((size, size), Image.Resampling.BILINEAR)


def _random_position(image: Image.Image, size: int, rng: random.Random) -> Image.Image:
    resized = resize_shorter_side(image, size, CROP)
    left, top = rng.randint(0, resized.width - size), rng.randint(0, resized.height - size)
    return resized.crop((left, top, left + size, top + size))


def _flipped(crop: Image.Image, rng: random.Random) -> Image.Image:
    return crop.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if rng.random() < 0.5 else crop


def random_box(width: int, height: int, rng: random.Random) -> Box:
    """Return a random crop with 8 to 100 % of the image's area and an aspect ratio from 3/4 to 4/3.

    If ten random sizes in a row don't fit into the image, return the largest centred crop with an aspect ratio in this range.

    Args:
        width, height: Size of the image in pixels.
        rng: Random numbers.
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
