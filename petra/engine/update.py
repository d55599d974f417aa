"""Updates of a stage's weights every k microbatches: a sequence of parts.

A plain run has the parts norm, check and step. What only some runs need is a part of its own: the all-reduce over replicas and
hooks of parameters before the norm, clipping and a loss scale before the check, the multiplication that both ask for after it,
extensions before the step, and a moving average last (:mod:`petra.engine.options`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf, nan
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from petra.engine.stage import Stage
from petra.errors import require
from petra.torch_private import foreach_mul_, foreach_norm, skips_steps

P = TypeVar("P", bound="Part")
LearningRate = Callable[[int], float]
"""Maps the number of microbatches that a stage has processed to a learning rate."""


@dataclass
class Pending:
    """An update in progress.

    Attributes:
        t: Number of microbatches that the stage has processed, including those of the update.
        done: Number of updates before this one, skipped ones included.
        squared_norm: Squared norm of the stage's accumulated gradient, in float64.
        squared_clip_norm: Squared norm to clip by: the stage's, or the whole network's.
        factor: What :class:`ScaleGradients` multiplies the gradients by. Parts after it find the gradients of the step.
        skip: Flag on the device whether to skip the step; None if all values are known to be finite.
    """

    t: int
    done: int
    squared_norm: Tensor
    squared_clip_norm: Tensor
    factor: Tensor | None = None
    skip: Tensor | None = None


class Part:
    """One part of an update. Parts that keep numbers between updates override the other methods, too.

    Attributes:
        events: Events of :class:`petra.hooks.Hook` before and after :meth:`run`, given stage and microbatch; empty for none.
    """

    events = ("", "")

    def run(self, pending: Pending) -> None:
        """Do this part of an update."""

    def numbers(self) -> dict[str, Any]:
        """Return the numbers that a checkpoint contains, by name."""
        return {}

    def load(self, numbers: Mapping[str, Any]) -> None:
        """Restore the numbers of a checkpoint. Weights have been loaded."""

    def tensors(self) -> dict[str, dict[Tensor, Tensor]]:
        """Return further state that a checkpoint contains: tensors by kind (``method/`` and a name), then by parameter."""
        return {}

    def resume(self, tensors: Mapping[str, Mapping[Tensor, Tensor]]) -> None:
        """Restore the tensors of a checkpoint, after all else has been loaded. Without any, start again from the weights."""

    def metrics(self) -> dict[str, float]:
        """Return metrics since the last call, by name."""
        return {}


class GradientNorm(Part):
    """Computes the squared norm of the gradient of a stage's parameters."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters

    def run(self, pending: Pending) -> None:
        if self._parameters:
            pending.squared_norm = pending.squared_clip_norm = squared_norm(self._parameters)


def squared_norm(parameters: Sequence[nn.Parameter]) -> Tensor:
    """Return the squared norm of the parameters' gradients in float64."""
    return torch.stack(foreach_norm([p.grad for p in parameters])).double().square_().sum()


def scalar(value: float, device: torch.device) -> Tensor:
    """Return a float64 tensor with no dimensions."""
    return torch.full((), float(value), dtype=torch.float64, device=device)  # torch.tensor would wait for a GPU


class Clip(Part):
    """Clips the gradient by its norm, to a largest one."""

    def __init__(self, norm: float) -> None:
        self._norm = norm

    def run(self, pending: Pending) -> None:
        pending.factor = (self._norm / (pending.squared_clip_norm.sqrt() + 1e-6)).clamp(max=1.0)


class ScaleGradients(Part):
    """Multiplies the gradients once by the factor of clipping and loss scale. Comes after the check, which may adapt the scale."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters

    def run(self, pending: Pending) -> None:
        if pending.factor is not None:
            for kind in {p.grad_dtype for p in self._parameters}:
                foreach_mul_([p.grad for p in self._parameters if p.grad_dtype is kind], pending.factor.to(kind))


class OptimizerStep(Part):
    """Runs the optimizer.

    Args:
        stage: The stage.
        optimizer: Optimizer of the stage's parameters; None if it has none.
        learning_rate: Called with the number of microbatches processed, including those of the update; None keeps the optimizer's
            own.

    Attributes:
        reads_skip: Whether the host reads the flag of each update, so that nothing of a skipped step runs on a GPU either.
    """

    reads_skip = False

    def __init__(self, stage: Stage, optimizer: torch.optim.Optimizer | None, learning_rate: LearningRate | None) -> None:
        self.stage, self.optimizer, self.learning_rate = stage, optimizer, learning_rate
        self.events = ("update_begin", "update_end") if optimizer is not None else ("", "")

    def run(self, pending: Pending) -> None:
        if self.optimizer is None:
            return
        with self.stage.updating():
            self.set_learning_rate(pending.t)
            if pending.skip is not None:
                # Fused optimizers skip the step on a GPU without synchronization.
                if pending.skip.device.type == "cuda" and skips_steps(self.optimizer) and not self.reads_skip:
                    self.optimizer.found_inf = pending.skip.float()  # type: ignore[attr-defined]
                elif pending.skip.item():
                    return
            self.optimizer.step()

    def set_learning_rate(self, t: int) -> None:
        """Set the optimizer's learning rate for an update after ``t`` microbatches."""
        if self.learning_rate is not None and self.optimizer is not None:
            found = self.learning_rate(t)
            single = hasattr(found, "__float__") and not getattr(found, "ndim", 0)
            rate = float(found) if single else nan  # a tensor remains the caller's, who may change it
            require(0 <= rate < inf, f"learning_rate({t})", "a number >= 0", repr(found))
            for group in self.optimizer.param_groups:
                if isinstance(group["lr"], Tensor):
                    group["lr"].fill_(rate)
                else:
                    group["lr"] = rate


class Update:
    """The updates of one stage.

    Args:
        parts: The parts, in the order in which they run. One is a :class:`GradientNorm`, and a later one a :class:`OptimizerStep`.
        device: Device of the stage's tensors.

    Attributes:
        done: Number of updates, skipped ones included.
        last_t: Number of microbatches that the stage had processed at its last update.
    """

    def __init__(self, parts: Sequence[Part], device: torch.device) -> None:
        self.parts, self.done, self.last_t = list(parts), 0, 0
        self._zero = scalar(0, device)

    def __call__(self, t: int) -> None:
        """Update after microbatch ``t``, counted from 1."""
        pending = self.begin(t)
        for part in self.parts:
            part.run(pending)

    def begin(self, t: int) -> Pending:
        """Count an update, and return it."""
        pending = Pending(t, self.done, self._zero, self._zero)
        self.last_t, self.done = t, self.done + 1
        return pending

    def part(self, kind: type[P]) -> P | None:
        """Return the part of a class, or None."""
        return next((part for part in self.parts if isinstance(part, kind)), None)

    def __getitem__(self, kind: type[P]) -> P:
        """Return the part of a class, which every update has."""
        return next(part for part in self.parts if isinstance(part, kind))

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The stage's optimizer; None if it has no parameters."""
        return self[OptimizerStep].optimizer

    def metrics(self) -> dict[str, float]:
        """Return the metrics of all parts since the last call."""
        return {key: value for part in self.parts for key, value in part.metrics().items()}
