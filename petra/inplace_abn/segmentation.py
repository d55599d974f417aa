"""Data sets for semantic segmentation, in the folders in which they are published."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from petra.data.dataset import Dataset, Part, Split
from petra.data.files import folder_of, folders_in, listed, require_all
from petra.errors import Count, DataError, alternatives, invalid, require
from petra.inplace_abn.class_uniform import ClassUniform, class_presence
from petra.inplace_abn.crops import tiles_of
from petra.inplace_abn.label_maps import Files, LabelValues, Pair, TileSamples, TrainingSamples, require_headers, size_of

log = logging.getLogger(__name__)

SAMPLINGS = ("shuffle", "class_uniform")
EXTENSIONS = (".jpg", ".jpeg", ".png", ".webp")
"""Extensions of image files, in lower case."""
HELP = "data.root is a folder with images/SPLIT/NAME.jpg (or .png, .webp) and labels/SPLIT/NAME.png"
CITYSCAPES_HELP = (
    "data.root is a folder with leftImg8bit/SPLIT/CITY/*_leftImg8bit.png and gtFine/SPLIT/CITY/*_gtFine_labelIds.png: unpack "
    "leftImg8bit_trainvaltest.zip and gtFine_trainvaltest.zip of https://www.cityscapes-dataset.com"
)
VISTAS_HELP = (
    "data.root is a folder with training/images/*.jpg and training/labels/*.png (or training/v1.2/labels), and the same under "
    "validation: unpack Mapillary Vistas, https://www.mapillary.com/dataset/vistas"
)
COCOSTUFF_HELP = (
    "data.root is a folder with images/train2017/*.jpg and annotations/train2017/*.png, and the same for val2017: unpack "
    "train2017.zip and val2017.zip of https://cocodataset.org, and stuffthingmaps_trainval2017.zip of "
    "https://github.com/nightrome/cocostuff"
)
CAMVID_CLASSES = 11
VISTAS_CLASSES = 65
"""Number of classes; the value 65 is ignored."""
COCO_THINGS, COCO_STUFF = 91, 91
"""Numbers of values of things, which are ignored, and of stuff, which follow. 255 is ignored too."""


def class_names(data: str, classes: int) -> tuple[str, ...]:
    """Return the names of the classes of a data set, in the order of their numbers. Where none are known, they are the numbers."""
    return tuple(_known_classes(data) or map(str, range(classes)))


def _known_classes(data: str) -> Any:
    """Return what class_names.yaml has for a data set, or None."""
    import yaml  # a requirement of the commands, which the layer does without

    return yaml.safe_load(files("petra.inplace_abn").joinpath("class_names.yaml").read_text(encoding="utf-8")).get(data)


def segmentation(
    root: str | Path | None = None,
    classes: int = 2,
    size: int = 512,
    height: Count | None = None,
    void: int = 255,
    sampling: str = "shuffle",
    split: Part = "val",
) -> Dataset:
    """Return the images in ``root``/images/SPLIT with the labels in ``root``/labels/SPLIT, for the splits train and ``split``.

    Training reads random windows: flip with probability 1/2, resized by 0.7 to 2.0, then cropped. Evaluation reads whole images as
    tiles of the same size, which count each pixel once. Pixels beyond the edges of an image are ignored.

    Args:
        root: Folder with ``images`` and ``labels``.
        classes: Number of classes. Labels are 0, 1, ..., and ``void``.
        size: Width of a sample in pixels.
        height: Height of a sample in pixels; None for ``size``.
        void: Label of pixels to ignore.
        sampling: ``shuffle``: each epoch shows each image once; ``class_uniform``: an epoch shows all classes equally often
            (:class:`petra.inplace_abn.class_uniform.ClassUniform`).
        split: Split for evaluation.

    Raises:
        ConfigError: If a value is out of range.
        DataError: If ``root`` is None, or a folder or a label file is missing.
    """
    require(2 <= classes <= 255, "data.classes", "an integer from 2 to 255", classes)
    require(classes <= void <= 255, "data.void", f"an integer from {classes}, the number of classes, to 255", void)

    def pairs(folder: Path, split: str) -> list[Pair]:
        found = _files(folder / "images" / split, EXTENSIONS, HELP)
        known = [Pair(image, folder / "labels" / split / f"{image.stem}.png") for image in found]
        others = {*(folder / "labels" / split).glob("*.png")} - {pair.labels for pair in known}
        if others:
            log.warning("%s: labels without an image, %d in all", min(others), len(others))
        return known

    known = {value: value for value in range(classes)}
    values = LabelValues(known, [void], f"from 0 to {classes - 1}, or {void} for pixels to ignore")
    return _dataset("segmentation", HELP, root, pairs, ("train", split), values, size, height, sampling)


def cityscapes(
    root: str | Path | None = None, size: int = 512, height: Count | None = None, sampling: str = "shuffle", split: Part = "val"
) -> Dataset:
    """Return Cityscapes with fine annotations: 2975 training and 500 validation images of 2048x1024 pixels, 19 classes.

    Args:
        root: Folder with ``leftImg8bit`` and ``gtFine``.
        size, height, sampling, split: As for :func:`segmentation`.

    Raises:
        ConfigError, DataError: As for :func:`segmentation`.
    """

    def pairs(folder: Path, split: str) -> list[Pair]:
        images, labels, end = folder / "leftImg8bit" / split, folder / "gtFine" / split, "_leftImg8bit.png"
        cities = [images / name for name in folders_in(images, CITYSCAPES_HELP)]
        found = [image for city in cities for image in _files(city, (end.lower(),), CITYSCAPES_HELP)]
        require(len(found) > 0, str(images), "folders of images", f"none; {CITYSCAPES_HELP}", DataError)
        return [Pair(i, labels / i.parent.name / i.name.replace(end, "_gtFine_labelIds.png")) for i in found]

    known = {value: number for number, value in enumerate(_known_classes("cityscapes").values())}
    values = LabelValues(known, range(34), "from 0 to 33 (labelIds)")
    return _dataset("cityscapes", CITYSCAPES_HELP, root, pairs, ("train", split), values, size, height, sampling)


def camvid(
    root: str | Path | None = None, size: int = 320, height: Count | None = None, sampling: str = "shuffle", split: Part = "val"
) -> Dataset:
    """Return CamVid as SegNet uses it (Badrinarayanan et al. 2017): 367 training images of 480x360 pixels, 101 in val, 233 in test.

    Args:
        root: Folder with ``images`` and ``labels``, whose values are 0 to 10, and 11 for pixels to ignore.
        size, height, sampling, split: As for :func:`segmentation`.

    Raises:
        ConfigError, DataError: As for :func:`segmentation`.
    """
    return replace(segmentation(root, CAMVID_CLASSES, size, height, CAMVID_CLASSES, sampling, split), name="camvid")


def vistas(root: str | Path | None = None, size: int = 776, height: Count | None = None, sampling: str = "shuffle") -> Dataset:
    """Return Mapillary Vistas (research edition, labels of version 1.2): 18,000 training and 2000 validation images, 65 classes.

    Args:
        root: Folder with ``training`` and ``validation``.
        size, height, sampling: As for :func:`segmentation`.

    Raises:
        ConfigError, DataError: As for :func:`segmentation`.
    """

    def pairs(folder: Path, split: str) -> list[Pair]:
        labels = folder / split / "v1.2" / "labels"
        labels = labels if labels.is_dir() else folder / split / "labels"
        return [Pair(image, labels / f"{image.stem}.png") for image in _files(folder / split / "images", EXTENSIONS, VISTAS_HELP)]

    known = {value: value for value in range(VISTAS_CLASSES)}
    values = LabelValues(known, [VISTAS_CLASSES], f"from 0 to {VISTAS_CLASSES}")
    return _dataset("vistas", VISTAS_HELP, root, pairs, ("training", "validation"), values, size, height, sampling)


def cocostuff(root: str | Path | None = None, size: int = 480, height: Count | None = None, sampling: str = "shuffle") -> Dataset:
    """Return COCO-Stuff: the images of COCO 2017 that have annotations, and the 91 classes of stuff. Things are ignored.

    Args:
        root: Folder with ``images`` and ``annotations``.
        size, height, sampling: As for :func:`segmentation`.

    Raises:
        ConfigError, DataError: As for :func:`segmentation`.
    """

    def pairs(folder: Path, split: str) -> list[Pair]:
        # Some releases annotate a part of the images only, so the labels determine the samples.
        found = _files(folder / "annotations" / split, (".png",), COCOSTUFF_HELP)
        return [Pair(folder / "images" / split / f"{labels.stem}.jpg", labels) for labels in found]

    known = {COCO_THINGS + number: number for number in range(COCO_STUFF)}
    values = LabelValues(known, [*range(COCO_THINGS), 255], f"from 0 to {COCO_THINGS + COCO_STUFF - 1}, or 255")
    return _dataset("cocostuff", COCOSTUFF_HELP, root, pairs, ("train2017", "val2017"), values, size, height, sampling)


def _dataset(
    name: str,
    help: str,
    root: str | Path | None,
    pairs: Callable[[Path, str], list[Pair]],
    splits: tuple[str, str],
    values: LabelValues,
    width: int,
    height: int | None,
    sampling: str,
) -> Dataset:
    folder, size, classes = folder_of(root, name, help), (width, height or width), len(values.known)
    require(sampling in SAMPLINGS, "data.sampling", alternatives(SAMPLINGS), sampling)
    train, test = (Files(_complete(pairs(folder, split), help), values, size, classes) for split in splits)
    same = {pair.image.parent.resolve() for pair in train.pairs} & {pair.image.parent.resolve() for pair in test.pairs}
    require(not same, str(min(same, default="")), f"other images in {splits[1]} than in {splits[0]}", "the same folder", DataError)
    require_all(require_headers, [*train.pairs, *test.pairs])
    order = ClassUniform(class_presence(train)) if sampling == "class_uniform" else None
    tiles = [tile for i, pair in enumerate(test.pairs) for tile in tiles_of(i, size_of(pair.image), size)]
    random, whole = TrainingSamples(train), TileSamples(test, tiles)
    shown = Split(len(train.pairs), random, random.labels, epoch_seed=True, decodes_targets=True, order=order)
    return Dataset(name, classes, size[0], shown, Split(len(tiles), whole, whole.labels, decodes_targets=True))


def _complete(pairs: Sequence[Pair], help: str) -> Sequence[Pair]:
    """Return the pairs, after a check that both files of each exist.

    Raises:
        DataError: If one does not, or two images have the same labels.
    """
    twice = next((labels for labels, count in Counter(pair.labels for pair in pairs).items() if count > 1), None)
    require(twice is None, str(twice), "labels of one image", "those of two, with different endings", DataError)
    for pair in pairs:
        for path, other in ((pair.labels, pair.image), (pair.image, pair.labels)):
            if not path.is_file():
                raise invalid(str(path), f"a file, which belongs to {other.name}", f"none; {help}", DataError)
    return pairs


def _files(folder: Path, endings: tuple[str, ...], help: str) -> list[Path]:
    found = [folder / name for name in listed(folder, help) if name.lower().endswith(endings)]
    require(len(found) > 0, str(folder), f"files that end in {alternatives(endings)}", f"none; {help}", DataError)
    return found
