"""Evaluation of a trained network on the test data of its run."""

from __future__ import annotations

from math import isnan
from typing import Any

from petra.distributed import raise_on_all_ranks
from petra.inplace_abn import ConfusionMatrix
from petra.inplace_abn.segmentation import CITYSCAPES_CLASSES
from petra.training import limited, means

from ..config.schema import Config
from ..runtime.rank import Process
from .build import Setup, set_numerics, set_up
from .weights import Weights, for_inference


def evaluate(config: Config, weights: Weights, process: Process) -> dict[str, Any]:
    """Return loss and metrics on the test data, the same on every rank.

    With pixels, also the intersection over union by class, None for classes that don't occur.

    Args:
        config: Configuration of the run.
        weights: Weights of the run.
        process: This process.

    Raises:
        PetraError: If the configuration, the data or the weights can't be used. Raised on every rank.
    """
    config = for_inference(config)
    setup = set_up(config, process)
    set_numerics(config.trainer)
    with process.process_group(setup.device, config.trainer.timeout):
        return _evaluate_in_group(setup, weights)


def _evaluate_in_group(setup: Setup, weights: Weights) -> dict[str, Any]:
    """Return loss and metrics. The pipeline ends with this function, before the process group does."""
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
