"""What may attach to each stage of a run from outside of the engine: parts of updates, wrappers of runners and ports."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from petra.engine.block import BlockRunner
from petra.engine.stage import Stage
from petra.engine.update import LearningRate, Part
from petra.engine.worker import Worker
from petra.method import Method
from petra.plan import Plan
from petra.transport import Port
from petra.update_rules import UpdateRules


@dataclass(frozen=True)
class Extension:
    """Base class of extensions, frozen dataclasses of their settings. Every method leaves a run as it is by default.

    Extensions are attached in the order of a run's list, except that those with ``derives = True``, which compute weights from what
    others have changed, come last. Remedies for stale gradients (:mod:`petra.staleness`) are extensions that depend on a stage's
    staleness s = τ / k (:attr:`petra.plan.StagePlan.staleness`).
    """

    def check(self, method: Method, rules: UpdateRules, rate: LearningRate | None) -> None:
        """Check that the method and the other settings of a run allow this extension.

        Raises:
            ConfigError: If they don't.
        """

    def prepare(self, optimizer: torch.optim.Optimizer) -> None:
        """Check that the extension is defined for an optimizer, and change the optimizer's settings if necessary.

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

    def check_length(self, updates: int) -> None:
        """Check that a run of so many updates trains the weights that it evaluates.

        Raises:
            ConfigError: If it does not.
        """

    def parts(self, stage: Stage, optimizer: torch.optim.Optimizer, plan: Plan, j: int) -> Sequence[Part]:
        """Return parts to run in stage j's updates (j from 0) before the step, on the gradients that it will use."""
        return ()

    def parts_after_step(self, stage: Stage, plan: Plan, j: int, others: Sequence[Part]) -> Sequence[Part]:
        """Return parts to run after the step of a stage that has parameters, given the extensions' parts before it."""
        return ()

    def when_completed(self, act: Callable[[int], None], plan: Plan, workers: Mapping[int, Worker]) -> Callable[[int], None]:
        """Return what a rank does, with global clipping, after each microbatch that all stages have done; by default ``act``."""
        return act
