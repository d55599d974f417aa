"""Pictures of test images with their labels and the predictions of a network."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from PIL import Image, ImageColor, ImageDraw
from torch import nn

from petra.inplace_abn.crops import Classes, Pixels
from petra.inplace_abn.label_maps import TileSamples, read_image
from petra.specs import IGNORED

LINE = 16
"""Height of a line of text in pixels."""


def pictures(network: nn.Module, reader: TileSamples, names: Sequence[str], count: int) -> Iterator[tuple[str, Image.Image]]:
    """Yield the name and the picture of each of the first ``count`` images: beside its labels and its prediction, above a legend.

    Args:
        network: The trained network, in evaluation mode.
        names: Names of the classes.
    """
    for index, pair in enumerate(reader.files.pairs[:count]):
        labels, found = reader.files.read_labels(index), predicted(network, reader, index)
        yield pair.image.stem, overview(read_image(pair.image), labels, found, names)


@torch.no_grad()
def predicted(network: nn.Module, reader: TileSamples, index: int) -> Classes:
    """Return the class with the highest score for each pixel of a test image, (H, W)."""
    found: Classes = np.full_like(reader.files.read_labels(index), IGNORED)
    for number, tile in enumerate(reader.tiles):
        if tile.image == index:
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
    mixed = 0.4 * np.asarray(image, np.float32) + 0.6 * palette[np.maximum(classes, 0)]
    return Image.fromarray(np.where(classes[..., None] >= 0, mixed, 0).round().astype(np.uint8))


def colours(count: int) -> Pixels:
    """Return a distinct RGB colour for each class, (count, 3): hues apart by the golden ratio, at three levels of brightness."""
    found = [ImageColor.getrgb(f"hsv({222.4922 * c % 360},78%,{(100, 75, 51)[c % 3]}%)") for c in range(count)]
    return np.array(found, np.uint8)
