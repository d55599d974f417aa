"""Evaluation of a trained network on the test data of its run."""

from __future__ import annotations

from collections.abc import Mapping
from math import isnan
from pathlib import Path
from typing import Any

from petra.distributed import raise_on_all_ranks
from petra.errors import require
from petra.inplace_abn import ConfusionMatrix
from petra.inplace_abn.label_maps import TileSamples
from petra.inplace_abn.pictures import pictures
from petra.inplace_abn.segmentation import CITYSCAPES_CLASSES
from petra.training import limited, means
from petra.training.records import write_text_atomically, writing

from ..config.schema import Config
from ..runtime.rank import Process
from .build import Setup, set_numerics, set_up
from .data import load
from .markdown import table
from .weights import Weights, for_inference


def evaluate(config: Config, weights: Weights, process: Process, folder: Path, images: int = 0) -> dict[str, Any]:
    """Return loss and metrics on the test data, the same on every rank.

    Args:
        config: Configuration of the run.
        weights: Weights of the run.
        process: This process.
        folder: Folder of the run.
        images: Number of test images of which pictures are written, to ``pictures`` in the folder.

    Raises:
        PetraError: If the configuration, the data or the weights can't be used. Raised on every rank.
    """
    config = for_inference(config)
    setup = set_up(config, process)
    set_numerics(config.trainer)
    fits = not images or setup.unit == "pixels"
    require(fits, "--pictures", f"none with data={config.data.name}, which has no pixels", images)
    with process.process_group(setup.device, config.trainer.timeout):
        numbers = _evaluate_in_group(setup, weights)
    if images and process.first:
        write_pictures(config, weights, numbers["iou"], folder / "pictures", images)
    return numbers


def _evaluate_in_group(setup: Setup, weights: Weights) -> dict[str, Any]:
    """Return loss and metrics. The pipeline ends with this function, before the process group does.

    With pixels, also the intersection over union by class, None for classes that don't occur.
    """
    train, test = setup.data()
    pipeline, data = setup.pipeline(), setup.config.data
    with raise_on_all_ranks():
        weights.load_into(pipeline, train.vocabulary)
    result = pipeline.evaluate(test, limited(test.batches, setup.config.trainer.limit_batches))
    numbers = {"weights": str(weights.path), setup.unit: result.targets, **means(result, setup.unit, test.bytes_per_target)}
    if "miou" in result.counts:
        values = ConfusionMatrix(data.classes).per_class(result.counts["miou"])
        names = CITYSCAPES_CLASSES if data.name == "cityscapes" else range(len(values))
        numbers["iou"] = {str(name): None if isnan(iou) else iou for name, iou in zip(names, values, strict=True)}
    return numbers


def write_pictures(config: Config, weights: Weights, per_class: Mapping[str, float | None], folder: Path, count: int) -> None:
    """Write one PNG file for each of the first ``count`` test images, and ``iou.md``, the table of the classes, to a folder."""
    reader = load(config.data).test.inputs
    assert isinstance(reader, TileSamples)
    rows = [[name, "–" if iou is None else f"{iou:.1%}"] for name, iou in per_class.items()]
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        write_text_atomically(folder / "iou.md", table(("class", "IoU"), rows, aligned=True))
        for name, picture in pictures(weights.network(config), reader, [*per_class], count):
            picture.save(folder / f"{name}.png")
