"""Training settings of a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.nn import functional as F

from petra.engine.endpoints import Loss, Losses
from petra.engine.metrics import Metric, correct_predictions, require_metrics
from petra.engine.update_rules import UpdateRules
from petra.errors import check_types, require
from petra.plan import Plan
from petra.staleness import Remedy

OptimizerFactory = Callable[[nn.Module], torch.optim.Optimizer]
"""Builds the optimizer of a stage's parameters from the module of its blocks."""


@dataclass(frozen=True)
class Recipe:
    """Training settings of a pipeline, the counterpart of its plan.

    Attributes:
        optimizer: Builds the optimizer of a stage from its blocks.
        learning_rate: Maps the number of microbatches done to a learning rate; None keeps the optimizer's own.
        loss: Mean loss of (output, targets); :class:`Losses` for two different ones. Targets of -100 do not count.
        metrics: Metrics by name: sums over targets, or confusion matrices. By default ``accuracy``, the correct predictions.
        seed: Seed of the weights and of the random numbers that blocks draw.
        rules: Clipping, moving averages and loss scale of the updates.
        remedy: Remedies for stale gradients; all are off by default.

    Raises:
        ConfigError: If a value has another type.
    """

    optimizer: OptimizerFactory
    learning_rate: Callable[[int], float] | None = None
    loss: Loss | Losses = F.cross_entropy
    metrics: Mapping[str, Metric] = field(default_factory=lambda: {"accuracy": correct_predictions})
    seed: int = 0
    rules: UpdateRules = UpdateRules()  # noqa: RUF009 (frozen)
    remedy: Remedy = Remedy()  # noqa: RUF009

    def __post_init__(self) -> None:
        expected = "a function that returns a stage's optimizer, given the module of its blocks"
        require(callable(self.optimizer), "optimizer", expected, repr(self.optimizer))
        rate = self.learning_rate
        require(rate is None or callable(rate), "learning_rate", "None or a function of the microbatches done", repr(rate))
        require_metrics(self.metrics)
        require(isinstance(self.rules, UpdateRules), "rules", "an UpdateRules", repr(self.rules))
        require(isinstance(self.remedy, Remedy), "remedy", "a Remedy", repr(self.remedy))
        check_types(self)
        assert self.losses

    @property
    def losses(self) -> Losses:
        """Losses of training and of evaluation."""
        return self.loss if isinstance(self.loss, Losses) else Losses(self.loss, self.loss)

    def check(self, plan: Plan) -> None:
        """Check that the method of a plan allows the remedy and the update rules.

        Raises:
            ConfigError: If it does not allow one of them.
        """
        self.remedy.check(plan.method)
        self.rules.check(plan.method, plan.delays)
        scaled = self.rules.loss_scale is not None and self.remedy.delay_compensation > 0
        require(not scaled, "remedy.delay_compensation", "0 with a loss scale (fp16)", self.remedy.delay_compensation)

    def settings(self) -> dict[str, object]:
        """Return the settings that all ranks must agree on, by name."""
        return {"remedy": self.remedy, "rules": self.rules, "seed": self.seed}
