"""From a configuration to what it says about updates: optimizer, learning rate, rules, loss, metrics."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, cast

import torch
from torch.nn import functional as F

from launch.config.options import options
from launch.config.schema import Config
from petra.engine.endpoints import Losses
from petra.engine.metrics import Metric, correct_predictions, top5_correct
from petra.engine.update import OptimizerFactory
from petra.engine.update_rules import UpdateRules
from petra.errors import ConfigError
from petra.training import OPTIMIZERS, SCHEDULES, Schedule, peak_rate

PRECISIONS = {"float32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
SCALINGS = ("goyal", "none")
SCOPES = ("stage", "global")

_RANGES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "momentum": (lambda v: 0 <= v < 1, "numbers from 0 up to 1"),
    "weight_decay": (lambda v: v >= 0, "numbers >= 0"),
    "trust": (lambda v: v > 0, "numbers > 0"),
    "betas": (lambda v: len(v) == 2 and all(0 <= beta < 1 for beta in v), "two numbers from 0 up to 1"),
    "eps": (lambda v: v > 0, "numbers > 0"),
}


def optimizer(config: Config) -> OptimizerFactory:
    """The optimizer of any stage.

    Raises:
        ConfigError: a value out of range, or a setting that this optimizer lacks.
    """
    optim = config.optim
    builder = OPTIMIZERS[optim.name]
    settings = options(optim, "optim", builder, ("lr", "scaling", "clip", "clip_scope", "ema"))
    for name, (right, accepted) in _RANGES.items():
        if name in settings and not right(settings[name]):
            raise ConfigError(f"optim.{name}: found {settings[name]}, accepted are {accepted}")
    if optim.nesterov and optim.momentum == 0:
        raise ConfigError("optim.nesterov: found True, accepted are false where optim.momentum=0")
    return partial(builder, **settings)


def learning_rate(config: Config, microbatches_per_epoch: int) -> Schedule:
    """The rate of every stage.

    Raises:
        ConfigError: a value out of range, or a setting that this schedule lacks.
    """
    optim = config.optim
    peak = peak_rate(optim.lr, config.data.batch_size, config.k) if optim.scaling == "goyal" else optim.lr
    builder = SCHEDULES[config.schedule.name]
    settings = options(config.schedule, "schedule", builder)
    return builder(peak, microbatches_per_epoch, config.trainer.epochs, **settings)


def rules(config: Config) -> UpdateRules:
    """What is done to gradients and weights beside the optimizer's step.

    Raises:
        ConfigError: a value out of range, or a loss scale that isn't fp16's.
    """
    optim, trainer = config.optim, config.trainer
    scale = trainer.loss_scale
    if trainer.precision == "fp16":
        scale = "dynamic" if scale is None else scale
    elif scale is not None:
        raise ConfigError(f"trainer.loss_scale: found {scale}, accepted is null for trainer.precision={trainer.precision}")
    return UpdateRules(
        clip=optim.clip,
        clip_globally=optim.clip_scope == "global",
        average=optim.ema,
        loss_scale=scale,
        nonfinite=cast(Literal["stop", "skip"], trainer.nonfinite),
    )


def losses(config: Config) -> Losses:
    """Of training and of evaluation, which is never smoothed.

    Raises:
        ConfigError: a value out of range.
    """
    smoothing = config.trainer.label_smoothing
    if not 0 <= smoothing < 1:
        raise ConfigError(f"trainer.label_smoothing: found {smoothing}, accepted are numbers from 0 up to 1")
    return Losses(partial(F.cross_entropy, label_smoothing=smoothing), F.cross_entropy)


def metrics(classes: int, unit: str) -> dict[str, Metric]:
    """Right answers, and for images of more than five classes those among the five best."""
    found: dict[str, Metric] = {"accuracy": correct_predictions}
    if unit == "images" and classes > 5:
        found["top5"] = top5_correct
    return found
