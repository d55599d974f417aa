"""The training recipe of a configuration: optimizer, learning rate, rules of an update, loss, metrics."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from torch.nn import functional as F

from petra.engine.endpoints import Losses
from petra.engine.metrics import MeanOutput, Metric, correct_predictions, top5_correct
from petra.engine.recipe import OptimizerFactory
from petra.engine.update_rules import UpdateRules
from petra.errors import require
from petra.inplace_abn import ConfusionMatrix, bootstrapped_cross_entropy
from petra.training import Schedule, peak_rate

from ..config.schema import RULES, Config, DataConfig
from ..config.targets import parameters
from .targets import built, factory


def optimizer(config: Config) -> OptimizerFactory:
    """Return a function that builds the optimizer of a stage.

    Raises:
        ConfigError: If Nesterov momentum is set with momentum 0.
    """
    options = config.optim.options()
    fits = not options.get("nesterov") or options.get("momentum") != 0
    require(fits, "optim.nesterov", "false with optim.momentum=0", True)
    return factory("optim", config.optim)


def learning_rate(config: Config, microbatches_per_epoch: int) -> Schedule:
    """Return the learning rate schedule, which is the same for every stage.

    Raises:
        ConfigError: If a value is out of range.
    """
    optim = config.optim
    peak = peak_rate(optim.lr, config.data.batch_size, config.k) if optim.scaling == "goyal" else optim.lr
    lengths = {"microbatches_per_epoch": microbatches_per_epoch, "epochs": config.trainer.epochs}
    return built(Schedule, "schedule", config.schedule, peak=peak, **lengths)  # type: ignore[type-abstract]


def rules(config: Config) -> UpdateRules:
    """Return the update rules: clipping, moving average, loss scale, reaction to non-finite gradients.

    Raises:
        ConfigError: If a value is out of range, or a loss scale is set for a precision other than fp16.
    """
    found, precision = UpdateRules(**{name: getattr(config.optim, name) for name in parameters(RULES)}), config.trainer.precision
    if precision == "fp16":
        return found if found.loss_scale is not None else replace(found, loss_scale="dynamic")
    require(found.loss_scale is None, "optim.loss_scale", f"null with trainer.precision={precision}", found.loss_scale)
    return found


def losses(config: Config) -> Losses:
    """Return the losses of training and of evaluation. Only training smooths labels and selects pixels."""
    trainer = config.trainer
    training = partial(F.cross_entropy, label_smoothing=trainer.label_smoothing)
    if trainer.bootstrap is not None:
        training = partial(bootstrapped_cross_entropy, fraction=trainer.bootstrap, label_smoothing=trainer.label_smoothing)
    crops = config.data.options().get("crops", 1)
    return Losses(training, F.cross_entropy if crops == 1 else MeanOutput(F.cross_entropy, crops))


def metrics(data: DataConfig, unit: str) -> dict[str, Metric]:
    """Return the metrics: top-1 accuracy, top-5 accuracy for images of more than five classes, and for pixels the mIoU."""
    found: dict[str, Metric] = {"accuracy": correct_predictions}
    if unit == "images" and data.classes > 5:
        found["top5"] = top5_correct
    if unit == "pixels":
        found["miou"] = ConfusionMatrix(data.classes)
    crops = data.options().get("crops", 1)
    return found if crops == 1 else {name: MeanOutput(metric, crops) for name, metric in found.items()}
