"""Pictures of a segmentation run: test images with their labels and predictions, and a table of the classes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageDraw
from torch import nn

from petra.inplace_abn.crops import Classes
from petra.inplace_abn.label_maps import TileSamples, read_image
from petra.specs import IGNORED
from petra.training.records import write_text_atomically, writing

from ..config.schema import DataConfig
from .data import load
from .markdown import aligned_table

OPACITY = 0.6
"""Opacity of the colours of classes over an image."""
LINE = 16
"""Height of a line of text in pixels."""


def write_pictures(data: DataConfig, network: nn.Module, per_class: Mapping[str, float | None], folder: Path, count: int) -> None:
    """Write one PNG file for each of the first ``count`` test images, and ``iou.md``, to a folder, which is created.

    Args:
        data: Configuration of the data.
        network: The trained network, in evaluation mode.
        per_class: Intersection over union by class name.

    Raises:
        DataError: If a file can't be read or written.
    """
    reader = load(data).test.inputs
    assert isinstance(reader, TileSamples)
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    rows = [[name, "–" if iou is None else f"{iou:.1%}"] for name, iou in per_class.items()]
    write_text_atomically(folder / "iou.md", aligned_table(("class", "IoU"), rows) + "\n")
    for index, pair in enumerate(reader.files.pairs[:count]):
        labels, found = reader.files.read_labels(index), predicted(network, reader, index)
        path = folder / f"{pair.image.stem}.png"
        with writing(path):
            overview(read_image(pair.image), labels, found, [*per_class]).save(path)


def predicted(network: nn.Module, reader: TileSamples, index: int) -> Classes:
    """Return the class with the highest score for each pixel of a test image, (H, W)."""
    height, width = reader.files.read_labels(index).shape
    found: Classes = np.full((height, width), IGNORED, np.int16)
    for number, tile in enumerate(reader.tiles):
        if tile.image == index:
            with torch.no_grad():
                classes = network(reader(torch.tensor([number]), None)).argmax(1)[0].numpy()
            x0, y0, x1, y1 = tile.counted
            found[tile.top + y0 : tile.top + y1, tile.left + x0 : tile.left + x1] = classes[y0:y1, x0:x1]
    return found


def overview(image: Image.Image, labels: Classes, found: Classes, names: Sequence[str]) -> Image.Image:
    """Return an image beside its labels and its predictions, above a legend. Pixels without a label are black."""
    parts = {"image": image, "labels": overlay(image, labels), "prediction": overlay(image, found)}
    columns = max(1, 3 * image.width // 120)
    rows = -(-len(names) // columns)
    sheet = Image.new("RGB", (3 * image.width, image.height + (rows + 1) * LINE), "white")
    draw = ImageDraw.Draw(sheet)
    for place, (title, part) in enumerate(parts.items()):
        draw.text((place * image.width + 4, 2), title, "black")
        sheet.paste(part, (place * image.width, LINE))
    for c, name in enumerate(names):
        left, top = c % columns * 120 + 4, LINE + image.height + c // columns * LINE + 2
        draw.rectangle((left, top, left + 11, top + 11), tuple(colours(len(names))[c].tolist()))
        draw.text((left + 16, top), name, "black")
    return sheet


def overlay(image: Image.Image, classes: Classes) -> Image.Image:
    """Return an image with the colours of the classes of its pixels over it, black where the class is ignored."""
    palette = colours(int(classes.max(initial=0)) + 1)
    shown = classes >= 0
    mixed = (1 - OPACITY) * np.asarray(image, np.float32) + OPACITY * palette[np.where(shown, classes, 0)]
    return Image.fromarray(np.where(shown[..., None], mixed, 0).round().astype(np.uint8))


def colours(count: int) -> NDArray[np.uint8]:
    """Return a distinct RGB colour for each class, (count, 3): hues apart by the golden ratio, at three levels of brightness."""
    hues = (np.arange(count) * 0.6180339887) % 1
    values = np.array([255, 190, 130])[np.arange(count) % 3]
    hsv = np.stack([255 * hues, np.full(count, 200), values], axis=1).astype(np.uint8)[None]
    found: NDArray[np.uint8] = np.asarray(Image.frombytes("HSV", (count, 1), hsv.tobytes()).convert("RGB"))[0]
    return found
