"""The training recipe of a configuration: optimizer, learning rate, rules of an update, loss, metrics."""

from __future__ import annotations

from functools import partial
from typing import Literal, cast

from torch.nn import functional as F

from petra.engine.endpoints import Losses
from petra.engine.metrics import Metric, correct_predictions
from petra.engine.options.metrics import MeanOutput, top5_correct
from petra.engine.recipe import OptimizerFactory
from petra.engine.update_rules import UpdateRules
from petra.errors import invalid, require
from petra.inplace_abn import ConfusionMatrix, bootstrapped_cross_entropy
from petra.training import OPTIMIZERS, SCHEDULES, Schedule, peak_rate

from ..config.options import options
from ..config.schema import Config, DataConfig


def optimizer(config: Config) -> OptimizerFactory:
    """Return a function that builds the optimizer of a stage.

    Raises:
        ConfigError: If an option is set that this optimizer doesn't have, or if Nesterov momentum is set with momentum 0.
    """
    optim = config.optim
    builder = OPTIMIZERS[optim.name]
    settings = options(optim, "optim", builder, ("lr", "scaling", "clip", "clip_scope", "ema"))
    require(not (optim.nesterov and optim.momentum == 0), "optim.nesterov", "false with optim.momentum=0", True)
    return partial(builder, **settings)


def learning_rate(config: Config, microbatches_per_epoch: int) -> Schedule:
    """Return the learning rate schedule, which is the same for every stage.

    Raises:
        ConfigError: If a value is out of range, or an option is set that this schedule doesn't have.
    """
    optim = config.optim
    peak = peak_rate(optim.lr, config.data.batch_size, config.k) if optim.scaling == "goyal" else optim.lr
    builder = SCHEDULES[config.schedule.name]
    settings = options(config.schedule, "schedule", builder)
    return builder(peak, microbatches_per_epoch, config.trainer.epochs, **settings)


def rules(config: Config) -> UpdateRules:
    """Return the update rules: clipping, moving average, loss scale, reaction to non-finite gradients.

    Raises:
        ConfigError: If a value is out of range, or a loss scale is set for a precision other than fp16.
    """
    optim, trainer = config.optim, config.trainer
    scale = trainer.loss_scale
    if trainer.precision == "fp16":
        scale = "dynamic" if scale is None else scale
    elif scale is not None:
        raise invalid("trainer.loss_scale", f"null with trainer.precision={trainer.precision}", scale)
    return UpdateRules(
        clip=optim.clip,
        clip_globally=optim.clip_scope == "global",
        average=optim.ema,
        loss_scale=scale,
        nonfinite=cast(Literal["stop", "skip"], trainer.nonfinite),
    )


def losses(config: Config) -> Losses:
    """Return the losses of training and of evaluation. Only training smooths labels and selects pixels."""
    trainer = config.trainer
    training = partial(F.cross_entropy, label_smoothing=trainer.label_smoothing)
    if trainer.bootstrap is not None:
        training = partial(bootstrapped_cross_entropy, fraction=trainer.bootstrap, label_smoothing=trainer.label_smoothing)
    crops = config.data.crops or 1
    return Losses(training, F.cross_entropy if crops == 1 else MeanOutput(F.cross_entropy, crops))


def metrics(data: DataConfig, unit: str) -> dict[str, Metric]:
    """Return the metrics: top-1 accuracy, top-5 accuracy for images of more than five classes, and for pixels the mIoU."""
    found: dict[str, Metric] = {"accuracy": correct_predictions}
    if unit == "images" and data.classes > 5:
        found["top5"] = top5_correct
    if unit == "pixels":
        found["miou"] = ConfusionMatrix(data.classes)
    crops = data.crops or 1
    return found if crops == 1 else {name: MeanOutput(metric, crops) for name, metric in found.items()}
