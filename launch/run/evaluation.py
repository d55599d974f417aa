"""Evaluation of a trained network on the test data of its run."""

from __future__ import annotations

from dataclasses import replace
from math import isnan
from typing import Any

from petra.distributed import raise_on_all_ranks
from petra.engine.totals import Result
from petra.errors import require
from petra.inplace_abn import ConfusionMatrix
from petra.inplace_abn.segmentation import CITYSCAPES_CLASSES
from petra.training import limited, load_into, means

from ..config.schema import Config, LoggerConfig
from ..runtime.rank import Process
from .build import Setup, set_numerics, set_up
from .pictures import Pictures
from .weights import Weights, require_vocabulary


def evaluate(config: Config, weights: Weights, process: Process, pictures: Pictures | None = None) -> dict[str, Any]:
    """Return loss and metrics on the test data, the same on every rank.

    Args:
        config: Configuration of the run.
        weights: Weights of the run.
        process: This process.
        pictures: Pictures of test images to write, or None.

    Raises:
        PetraError: If the configuration, the data or the weights can't be used. Raised on every rank.
    """
    config = for_inference(config)
    checked = set_up(config, process)
    set_numerics(config.trainer)
    if pictures is not None:
        require(checked.unit == "pixels", "pictures", f"none with data={config.data.name}, which has no pixels", pictures.count)
    with process.process_group(checked.device, config.trainer.timeout):
        numbers = evaluate_in_group(checked, weights)
    if pictures is not None and process.first:
        pictures.write(checked, weights.network(checked), numbers["iou"])
    return numbers


def for_inference(config: Config, device: str | None = None) -> Config:
    """Return the configuration of a run without what only its training uses: replicas, moving average, diagnostics, logging.

    Args:
        device: Device; None for that of the run.
    """
    trainer = replace(config.trainer, transport="auto", trace=None, diagnose=None, stage_metrics=False)
    trainer = replace(trainer, overlap=False, device=device or trainer.device)
    return replace(
        config,
        dp=1,
        optim=replace(config.optim, ema=None),
        trainer=trainer,
        cluster=replace(config.cluster, elastic=False),
        logger=LoggerConfig(name="jsonl"),
    )


def evaluate_in_group(setup: Setup, weights: Weights) -> dict[str, Any]:
    """Implement :func:`evaluate` inside the process group. The pipeline ends with this function, before the group does."""
    train, test = setup.data()
    with raise_on_all_ranks():
        if train.vocabulary is not None:
            require_vocabulary("data.root", train.vocabulary, weights.facts, weights.path)
        state = weights.read()
    pipeline = setup.pipeline(setup.learning_rate(1))
    with raise_on_all_ranks():
        load_into(pipeline, state, str(weights.path))
    result = pipeline.evaluate(test, limited(test.batches, setup.config.trainer.limit_batches))
    return {
        "weights": str(weights.path),
        setup.unit: result.targets,
        **means(result, setup.unit, test.bytes_per_target),
        **_per_class(setup, result),
    }


def _per_class(setup: Setup, result: Result) -> dict[str, dict[str, float | None]]:
    """Return the intersection over union by class, None for classes that don't occur. Nothing without a confusion matrix."""
    if "miou" not in result.counts:
        return {}
    values = ConfusionMatrix(setup.config.data.classes).per_class(result.counts["miou"])
    names = CITYSCAPES_CLASSES if setup.config.data.name == "cityscapes" else range(len(values))
    return {"iou": {str(name): None if isnan(iou) else iou for name, iou in zip(names, values, strict=True)}}
