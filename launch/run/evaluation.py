"""Evaluation of a trained network on the test data of its run."""

from __future__ import annotations

from dataclasses import replace
from math import isnan
from pathlib import Path
from typing import Any

from torch import nn

from petra.distributed import raise_on_all_ranks
from petra.engine.totals import Result
from petra.errors import ModelError, require
from petra.inplace_abn import ConfusionMatrix
from petra.inplace_abn.segmentation import CITYSCAPES_CLASSES
from petra.training import limited, load_into, means

from ..config.schema import Config, LoggerConfig
from ..runtime.rank import Process
from .build import Setup, set_numerics, set_up
from .pictures import Pictures
from .weights import read_weights, require_vocabulary, weight_facts


def evaluate(config: Config, weights: Path, process: Process, pictures: Pictures | None = None) -> dict[str, Any]:
    """Return loss and metrics on the test data, the same on every rank.

    Args:
        config: Configuration of the run.
        weights: File of exported weights, or folder of a checkpoint.
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
        pictures.write(checked, trained_network(checked, weights), numbers["iou"])
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


def trained_network(setup: Setup, weights: Path) -> nn.Module:
    """Return the whole network of a run as one module on the CPU, in evaluation mode.

    Raises:
        PetraError: If the weights can't be read, or are those of another network.
    """
    network = setup.plan.model.build(setup.config.seed)
    try:
        network.load_state_dict(read_weights(weights))
    except RuntimeError as error:
        raise ModelError(f"{weights}: does not fit {setup.plan.model.name} ({' '.join(str(error).split())})") from error
    return network.eval()


def evaluate_in_group(setup: Setup, weights: Path) -> dict[str, Any]:
    """Implement :func:`evaluate` inside the process group. The pipeline ends with this function, before the group does."""
    train, test = setup.data()
    with raise_on_all_ranks():
        if train.vocabulary is not None:
            require_vocabulary("data.root", train.vocabulary, weight_facts(weights), weights)
        state = read_weights(weights)
    pipeline = setup.pipeline(setup.learning_rate(1))
    with raise_on_all_ranks():
        load_into(pipeline, state, str(weights))
    result = pipeline.evaluate(test, limited(test.batches, setup.config.trainer.limit_batches))
    return {
        "weights": str(weights),
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
