"""Training settings of a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional as F

from petra.engine.endpoints import Loss, Losses
from petra.engine.metrics import Metric, correct_predictions
from petra.engine.update import LearningRate
from petra.errors import ModelError, alternatives, is_integer, require
from petra.plan import Plan
from petra.update_rules import UpdateRules

if TYPE_CHECKING:
    from petra.engine.options.extension import Extension

OptimizerFactory = Callable[[nn.Module], torch.optim.Optimizer]
"""Builds the optimizer of a stage from the module of its blocks, with parameters named ``<block's index in the stage>.<key>``."""


@dataclass(frozen=True)
class Recipe:
    """Training settings of a pipeline, the counterpart of its plan.

    Attributes:
        optimizer: Builds the optimizer of a stage from its blocks.
        learning_rate: Maps the number of microbatches done to a learning rate; None keeps the optimizer's own. Each stage calls it
            for its updates, so it must depend on its argument only.
        loss: Mean loss of (output, targets); :class:`Losses` for two different ones. Targets of -100 do not count.
        metrics: Metrics by name: sums over targets, or confusion matrices. By default ``accuracy``, the correct predictions.
        seed: Seed of the weights and of the random numbers that blocks draw.
        rules: Clipping, moving averages and loss scale of the updates.
        extensions: What else acts in a run, in this order, such as remedies for stale gradients (:mod:`petra.staleness`).

    Raises:
        ConfigError: If a value has another type.
    """

    optimizer: OptimizerFactory
    learning_rate: LearningRate | None = None
    loss: Loss | Losses = F.cross_entropy
    metrics: Mapping[str, Metric] = field(default_factory=lambda: {"accuracy": correct_predictions})
    seed: int = 0
    rules: UpdateRules = UpdateRules()  # noqa: RUF009 (frozen)
    extensions: Sequence[Extension] = ()

    def __post_init__(self) -> None:
        rate, metrics = self.learning_rate, self.metrics
        named = isinstance(metrics, Mapping) and all(isinstance(key, str) and callable(value) for key, value in metrics.items())
        listed = isinstance(self.extensions, list | tuple) and (not self.extensions or _are_extensions(self.extensions))
        for name, fits, expected in (
            ("optimizer", callable(self.optimizer), "a function that returns a stage's optimizer, given the module of its blocks"),
            ("learning_rate", rate is None or callable(rate), "None or a function of the microbatches done"),
            ("loss", callable(self.loss) or isinstance(self.loss, Losses), "a function of output and targets, or petra.Losses"),
            ("metrics", named and "loss" not in metrics, "functions of output and targets by name, none of them loss"),
            ("seed", is_integer(self.seed) and 0 <= self.seed < 2**63, "an integer >= 0 and < 2^63"),
            ("rules", isinstance(self.rules, UpdateRules), "an UpdateRules"),
            ("extensions", listed, "a list of petra.Extension, such as remedies, one of a kind"),
        ):
            require(fits, name, expected, repr(getattr(self, name)))
        object.__setattr__(self, "metrics", dict(metrics))  # the caller may change its own
        object.__setattr__(self, "extensions", tuple(sorted(self.extensions, key=lambda each: getattr(each, "derives", False))))

    @property
    def losses(self) -> Losses:
        """Losses of training and of evaluation."""
        return self.loss if isinstance(self.loss, Losses) else Losses(self.loss, self.loss)

    def check(self, plan: Plan) -> None:
        """Check that a plan allows the extensions, and global clipping if the rules ask for it, and that loss and metrics fit it.

        Raises:
            ConfigError: If its method does not allow one of them.
            ModelError: If its last block returns another number of tensors.
        """
        method, last = plan.method, plan.layout.profiles[-1]
        for name, function in {"loss": self.losses.training, "evaluation": self.losses.evaluation, **self.metrics}.items():
            accepted, count = [str(n) for n in getattr(function, "outputs", (1,))], str(len(last.outputs))
            require(count in accepted, f"outputs of block {last.name}", f"{alternatives(accepted)} for {name}", count, ModelError)
        for extension in self.extensions:
            extension.check(method, self.rules, self.learning_rate)
        self._check_rules(plan)

    def _check_rules(self, plan: Plan) -> None:
        """Check that plan and extensions allow what the rules ask for. :class:`UpdateRules` checks each rule alone."""
        rules, short, delay = self.rules, self.rules.weights == "bf16", plan.method.delay
        acting = ", ".join(type(each).__name__ for each in self.extensions if _acts_at_updates(each))
        apart, at_updates = any(plan.delays) and not plan.method.flush, f"with the extension {acting}, which acts at updates"
        for name, asked, wrong, expected in (
            ("clip_globally", rules.clip_globally, apart, f"false with method.delay={delay} and no flush"),
            ("shard", rules.shard, acting, f"false {at_updates}"),
            ("weights", short, plan.numerics.autocast is not torch.bfloat16, "float32 without trainer.precision=bf16"),
            ("weights", short, plan.layout.tp > 1, f"float32 with tp={plan.layout.tp}"),
            ("weights", short, rules.average is not None, f"float32 with optim.average={rules.average}, which would round to bf16"),
            ("weights", short, acting, f"float32 {at_updates}"),
        ):
            require(not (asked and wrong), f"optim.{name}", expected, getattr(rules, name))

    def settings(self) -> dict[str, object]:
        """Return the settings that all ranks must agree on, by name."""
        return {"extensions": list(self.extensions), "rules": self.rules, "seed": self.seed}


def _acts_at_updates(extension: Extension) -> bool:
    from petra.engine.options.extension import Extension

    return type(extension).parts is not Extension.parts


def _are_extensions(values: Sequence[object]) -> bool:
    from petra.engine.options.extension import Extension

    return all(isinstance(value, Extension) for value in values) and len({*map(type, values)}) == len(values)
