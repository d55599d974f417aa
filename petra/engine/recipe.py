"""Training settings of a pipeline, and what a remedy for stale gradients may attach to each stage of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.nn import functional as F

from petra.engine.block import BlockRunner
from petra.engine.endpoints import Loss, Losses
from petra.engine.metrics import Metric, correct_predictions, require_metrics
from petra.engine.stage import Stage
from petra.engine.update import Part
from petra.engine.update_rules import UpdateRules
from petra.errors import check_types, require
from petra.method import Method
from petra.plan import Plan
from petra.transport import Port

LearningRate = Callable[[int], float]
"""Maps the number of microbatches that a stage has processed to a learning rate."""
OptimizerFactory = Callable[[nn.Module], torch.optim.Optimizer]
"""Builds the optimizer of a stage's parameters from the module of its blocks."""


@dataclass(frozen=True)
class Remedy:
    """Base class of remedies, frozen dataclasses of their settings. Every method leaves a run as it is by default.

    The gradients of a stage are s = τ / k updates old on average (:attr:`petra.plan.StagePlan.staleness`). A run has a list of
    remedies, which are attached in its order.
    """

    def check(self, method: Method, recipe: Recipe) -> None:
        """Check that the method and the other settings of a run allow this remedy.

        Raises:
            ConfigError: If they don't.
        """

    def prepare(self, optimizer: torch.optim.Optimizer) -> None:
        """Check that the remedy is defined for an optimizer, and change the optimizer's settings if necessary.

        Raises:
            ConfigError: If it is not.
        """

    def learning_rate(self, rate: LearningRate | None, staleness: float) -> LearningRate | None:
        """Return the learning rate of a stage, given that of the run (None: the optimizer's own)."""
        return rate

    def wrap_runner(self, runner: BlockRunner) -> BlockRunner:
        """Return the runner of a block, or one that contains it (:class:`petra.engine.block.WrappedRunner`)."""
        return runner

    def wrap_port(self, upstream: Port, plan: Plan, j: int) -> Port:
        """Return the upstream port of stage j (from 0), or one that contains it (:class:`petra.transport.port.WrappedPort`)."""
        return upstream

    def parts(self, stage: Stage, optimizer: torch.optim.Optimizer, plan: Plan, j: int) -> Sequence[Part]:
        """Return the parts that this remedy adds to the updates of stage j (from 0), between the check and the step."""
        return ()


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
        remedies: Remedies for stale gradients, in the order in which they act.

    Raises:
        ConfigError: If a value has another type.
    """

    optimizer: OptimizerFactory
    learning_rate: LearningRate | None = None
    loss: Loss | Losses = F.cross_entropy
    metrics: Mapping[str, Metric] = field(default_factory=lambda: {"accuracy": correct_predictions})
    seed: int = 0
    rules: UpdateRules = UpdateRules()  # noqa: RUF009 (frozen)
    remedies: Sequence[Remedy] = ()

    def __post_init__(self) -> None:
        expected = "a function that returns a stage's optimizer, given the module of its blocks"
        require(callable(self.optimizer), "optimizer", expected, repr(self.optimizer))
        rate = self.learning_rate
        require(rate is None or callable(rate), "learning_rate", "None or a function of the microbatches done", repr(rate))
        require_metrics(self.metrics)
        require(isinstance(self.rules, UpdateRules), "rules", "an UpdateRules", repr(self.rules))
        listed = isinstance(self.remedies, list | tuple) and all(isinstance(remedy, Remedy) for remedy in self.remedies)
        require(listed, "remedies", "a list of remedies (petra.staleness)", repr(self.remedies))
        check_types(self)
        assert self.losses

    @property
    def losses(self) -> Losses:
        """Losses of training and of evaluation."""
        return self.loss if isinstance(self.loss, Losses) else Losses(self.loss, self.loss)

    def check(self, plan: Plan) -> None:
        """Check that the method of a plan allows the remedies and the update rules: global clipping needs updates at the same time.

        Raises:
            ConfigError: If it does not allow one of them.
        """
        self.check_remedies(plan.method)
        simultaneous = plan.method.flush or not any(plan.delays)
        expected = f"false with method.delay={plan.method.delay} and no flush, where stages update at different times"
        require(simultaneous or not self.rules.clip_globally, "optim.clip_globally", expected, "true")

    def check_remedies(self, method: Method) -> None:
        """Check that a method allows the remedies.

        Raises:
            ConfigError: If it does not allow one of them.
        """
        for remedy in self.remedies:
            remedy.check(method, self)

    def settings(self) -> dict[str, object]:
        """Return the settings that all ranks must agree on, by name."""
        return {"remedies": list(self.remedies), "rules": self.rules, "seed": self.seed}
