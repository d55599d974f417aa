"""Geometry of samples for segmentation: random windows of resized images for training, and tiles of whole images for evaluation."""

from __future__ import annotations

import math
import random
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from petra.data.imagenet import MOMENTS
from petra.specs import IGNORED

SCALES = (0.7, 2.0)
"""Range of the random factor by which training resizes an image (Rota Bulò et al. 2018, section 4.2)."""
MEAN_COLOUR = tuple(round(255 * mean) for mean in MOMENTS[0])
"""Colour of what a window shows beyond the edges of its image."""
Pixels = NDArray[np.uint8]
"""RGB image (H, W, 3)."""
Classes = NDArray[np.int16]
"""Class of each pixel (H, W), -100 for pixels to ignore."""
Size = tuple[int, int]
"""Width and height in pixels."""


class Window(NamedTuple):
    """The part of an image that a sample shows, in pixels of the image resized by ``scale``.

    Attributes:
        left, top: Position of the window. Negative if the window begins beyond the image.
        scale: Factor by which the image is resized.
        flip: Whether the result is flipped horizontally.
    """

    left: int
    top: int
    scale: float = 1.0
    flip: bool = False


def cut_image(image: Image.Image, window: Window, size: Size) -> Pixels:
    """Return the part of an RGB image that a window shows, (height, width, 3).

    Args:
        size: Width and height of the window.
    """
    part = Image.new("RGB", size, MEAN_COLOUR)
    _paste(part, image, window, Image.Resampling.BILINEAR)
    return np.asarray(part)


def cut_labels(labels: Classes, window: Window, size: Size) -> Classes:
    """Return the part of the labels that a window shows, (height, width), -100 beyond the edges of the image."""
    part = Image.new("I", size, IGNORED)
    _paste(part, Image.fromarray(labels.astype(np.int32)), window, Image.Resampling.NEAREST)
    return np.asarray(part).astype(np.int16)


def _paste(part: Image.Image, image: Image.Image, window: Window, method: Image.Resampling) -> None:
    """Draw what a window shows of an image, in place. Only the visible part of the image is resized."""
    (width, height), scale = image.size, window.scale
    left, top = max(0, -window.left), max(0, -window.top)
    right = min(part.width, scaled(width, scale) - window.left)
    bottom = min(part.height, scaled(height, scale) - window.top)
    if right > left and bottom > top:
        across, down = width / scaled(width, scale), height / scaled(height, scale)
        box = (window.left + left) * across, (window.top + top) * down, (window.left + right) * across, (window.top + bottom) * down
        inside = min(box[0], width), min(box[1], height), min(box[2], width), min(box[3], height)
        part.paste(image.resize((right - left, bottom - top), method, inside), (left, top))
    if window.flip:
        part.paste(part.transpose(Image.Transpose.FLIP_LEFT_RIGHT))


def scaled(side: int, scale: float) -> int:
    """Return a side in pixels after resizing by ``scale``."""
    return max(1, round(side * scale))


def random_pixel(labels: Classes, shown: int, rng: random.Random) -> tuple[int, int] | None:
    """Return column and row of a random pixel of class ``shown``, or None if there is none."""
    places = np.flatnonzero(labels == shown)
    if not len(places):
        return None
    row, column = divmod(int(places[rng.randrange(len(places))]), labels.shape[1])
    return column, row


def random_window(whole: Size, size: Size, rng: random.Random, pixel: tuple[int, int] | None = None) -> Window:
    """Return a random window: flip with probability 1/2, scale from 0.7 to 2.0, position uniform.

    Args:
        whole: Width and height of the image.
        size: Width and height of the window.
        rng: Random numbers.
        pixel: Column and row of a pixel that the window must show, or None.
    """
    flip, scale = rng.random() < 0.5, rng.uniform(*SCALES)
    found = []
    for axis, (side, part) in enumerate(zip(whole, size, strict=True)):
        resized = scaled(side, scale)
        low, high = min(0, resized - part), max(0, resized - part)
        if pixel is not None and resized > part:
            at = math.floor((pixel[axis] + 0.5) * resized / side)  # the centre of the pixel
            low, high = max(low, at - part + 1), min(high, at)
        found.append(rng.randint(low, high))
    return Window(found[0], found[1], scale, flip)


class Tile(NamedTuple):
    """A window of a test image, and the part of it that counts, so that the tiles of an image count each pixel once.

    Attributes:
        image: Number of the image.
        left, top: Position of the window in the image.
        counted: Left, upper, right and lower edge of the counted part, in pixels of the window.
    """

    image: int
    left: int
    top: int
    counted: tuple[int, int, int, int]


def tiles_of(image: int, whole: tuple[int, int], size: Size) -> list[Tile]:
    """Return the tiles that cover an image: as few as possible, evenly spaced. Where two overlap, each counts its half.

    Args:
        image: Number of the image.
        whole: Width and height of the image.
        size: Width and height of a tile.
    """
    across, down = (_spans(side, part) for side, part in zip(whole, size, strict=True))
    return [Tile(image, x, y, (x0, y0, x1, y1)) for y, y0, y1 in down for x, x0, x1 in across]


def _spans(side: int, part: int) -> list[tuple[int, int, int]]:
    """Return start, and first and last counted pixel + 1 relative to the start, of each tile along one axis."""
    count = -(-side // part)
    starts = [round(i * (side - part) / (count - 1)) for i in range(count)] if count > 1 else [0]
    edges = [0, *((a + part + b) // 2 for a, b in pairwise(starts)), side]
    return [(start, edges[i] - start, edges[i + 1] - start) for i, start in enumerate(starts)]
