"""Evaluation of a trained network on the test data of its run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from petra.distributed import raise_on_all_ranks
from petra.training import limited, load_into, means

from ..config.schema import Config, LoggerConfig
from ..runtime.rank import Process
from .build import Setup, set_up
from .resume import read_weights


def evaluate(config: Config, weights: Path, process: Process) -> dict[str, float | str]:
    """Return loss and metrics on the test data, the same on every rank.

    Args:
        config: Configuration of the run.
        weights: File of exported weights, or folder of a checkpoint.
        process: This process.

    Raises:
        PetraError: If the configuration, the data or the weights can't be used. Raised on every rank.
    """
    # The weights are final, so no moving average is needed. Replicas, diagnostics and logging belong to training.
    trainer = replace(config.trainer, transport="auto", trace=None, diagnose=None, stage_metrics=False)
    config = replace(config, dp=1, optim=replace(config.optim, ema=None), trainer=trainer, logger=LoggerConfig(name="jsonl"))
    checked = set_up(config, process)
    torch.set_num_threads(config.trainer.threads)
    with process.process_group(checked.device, config.trainer.timeout):
        return evaluate_in_group(checked, weights)


def evaluate_in_group(setup: Setup, weights: Path) -> dict[str, float | str]:
    """Implement :func:`evaluate` inside the process group. The pipeline ends with this function, before the group does."""
    _, test = setup.data()
    with raise_on_all_ranks():
        state = read_weights(weights)
    pipeline = setup.pipeline(setup.learning_rate(1))
    with raise_on_all_ranks():
        load_into(pipeline, state, str(weights))
    result = pipeline.evaluate(test, limited(test.batches, setup.config.trainer.limit_batches))
    return {"weights": str(weights), setup.unit: result.targets, **means(result, setup.unit, test.bytes_per_target)}
