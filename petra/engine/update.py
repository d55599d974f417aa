"""Updates of a stage's weights every k microbatches: a sequence of parts.

A plain run has the parts norm, clip, check and step. What only some runs need is a part of its own: the
all-reduce over replicas, which comes first, parts of remedies, before the step, or a moving average, which comes last
(:mod:`petra.engine.options`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from petra.engine.accumulation import Accumulation
from petra.engine.stage import Stage
from petra.torch_private import foreach_mul_, foreach_norm, late_hooks, skips_steps

P = TypeVar("P", bound="Part")


@dataclass
class Pending:
    """An update in progress.

    Attributes:
        t: Number of microbatches that the stage has processed, including those of the update.
        done: Number of updates before this one, skipped ones included.
        squared_norm: Squared norm of the stage's accumulated gradient, unscaled, in float64.
        clip_norm: Squared norm to clip by: the stage's, or the whole network's.
        scale: Loss scale of the accumulated gradients; None for 1.
        factor: Factor of the gradients, which includes the division by the scale; None for 1.
        skip: Flag on the device whether to skip the step; None if all values are known to be finite.
    """

    t: int
    done: int
    squared_norm: Tensor
    clip_norm: Tensor
    scale: Tensor | None = None
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
        """Return further state that a checkpoint contains: tensors by kind, then by parameter."""
        return {}

    def resume(self, tensors: Mapping[str, Mapping[Tensor, Tensor]]) -> None:
        """Restore the tensors of a checkpoint, after all else has been loaded. Without any, start again from the weights."""

    def metrics(self) -> dict[str, float]:
        """Return metrics since the last call, by name."""
        return {}


class Norm(Part):
    """Calls the hooks of ``register_hook`` with the accumulated gradients, then measures their norm.

    Args:
        gradients: Gradients of the stage.
    """

    def __init__(self, gradients: Accumulation) -> None:
        self._gradients = gradients

    def run(self, pending: Pending) -> None:
        self._gradients.call_hooks(pending.scale)
        if self._gradients.parameters:
            scaled = squared_norm(self._gradients.parameters)
            pending.squared_norm = pending.clip_norm = scaled if pending.scale is None else scaled / pending.scale.square()


def squared_norm(parameters: Sequence[nn.Parameter]) -> Tensor:
    """Return the squared norm of the parameters' gradients in float64."""
    return torch.stack(foreach_norm([p.grad for p in parameters])).double().square().sum()


def scalar(value: float, device: torch.device) -> Tensor:
    """Return a float64 tensor with no dimensions."""
    return torch.full((), float(value), dtype=torch.float64, device=device)  # torch.tensor would wait for a GPU


class Clip(Part):
    """Clips the gradient by its norm, and removes the loss scale by the same multiplication.

    Args:
        norm: Largest norm; None leaves gradients as they are.
    """

    def __init__(self, norm: float | None) -> None:
        self._norm = norm

    def run(self, pending: Pending) -> None:
        if self._norm is not None:
            pending.factor = (self._norm / (pending.clip_norm.sqrt() + 1e-6)).clamp(max=1.0)
        if pending.scale is not None:
            pending.factor = 1 / pending.scale if pending.factor is None else pending.factor / pending.scale


class Step(Part):
    """Runs the optimizer.

    Args:
        stage: The stage.
        optimizer: Optimizer of the stage's parameters; None if it has none.
        learning_rate: Maps the number of microbatches that the stage has processed, including those of the update, to the
            learning rate. None keeps the optimizer's own.
    """

    def __init__(self, stage: Stage, optimizer: torch.optim.Optimizer | None, learning_rate: Callable[[int], float] | None) -> None:
        self.stage, self.optimizer, self.learning_rate = stage, optimizer, learning_rate
        self.events = ("update_begin", "update_end") if optimizer is not None else ("", "")

    def run(self, pending: Pending) -> None:
        if self.optimizer is None:
            return
        parameters = self.stage.gradients.parameters
        if pending.factor is not None:
            foreach_mul_([p.grad for p in parameters], pending.factor.to(parameters[0].dtype))
        with self.stage.updating():
            self.set_learning_rate(pending.t)
            _step(self.optimizer, pending.skip, self.stage.gradients)

    def set_learning_rate(self, t: int) -> None:
        """Set the optimizer's learning rate for an update after ``t`` microbatches."""
        if self.learning_rate is not None and self.optimizer is not None:
            rate = self.learning_rate(t)
            for group in self.optimizer.param_groups:
                group["lr"] = rate


class Update:
    """The updates of one stage.

    Args:
        parts: The parts, in the order in which they run. One is a :class:`Norm`, and a later one a :class:`Step`.
        device: Device of the stage's tensors.

    Attributes:
        done: Number of updates, skipped ones included.
        microbatches_done: Number of microbatches that the stage had processed at its last update.
    """

    def __init__(self, parts: Sequence[Part], device: torch.device) -> None:
        self.parts, self.done, self.microbatches_done = list(parts), 0, 0
        self._zero = scalar(0, device)

    def __call__(self, t: int) -> None:
        """Update after microbatch ``t``, counted from 1."""
        self.finish(self.begin(t))

    def begin(self, t: int) -> Pending:
        """Run the parts up to the norm."""
        self.microbatches_done = t
        pending = Pending(t, self.done, self._zero, self._zero)
        for part in self.parts[: self._measured()]:
            part.run(pending)
        return pending

    def finish(self, pending: Pending) -> None:
        """Run the parts after the norm."""
        self.done += 1
        for part in self.parts[self._measured() :]:
            part.run(pending)

    def _measured(self) -> int:
        """Return the number of parts up to the norm."""
        return 1 + next(i for i, part in enumerate(self.parts) if isinstance(part, Norm))

    def part(self, kind: type[P]) -> P | None:
        """Return the part of a class, or None."""
        return next((part for part in self.parts if isinstance(part, kind)), None)

    def __getitem__(self, kind: type[P]) -> P:
        """Return the part of a class, which every update has."""
        return next(part for part in self.parts if isinstance(part, kind))

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The stage's optimizer; None if it has no parameters."""
        step = self.part(Step)
        return None if step is None else step.optimizer

    def metrics(self) -> dict[str, float]:
        """Return the metrics of all parts since the last call."""
        return {key: value for part in self.parts for key, value in part.metrics().items()}


def _step(optimizer: torch.optim.Optimizer, skip: Tensor | None, gradients: Accumulation) -> None:
    """Run late hooks and the optimizer, unless ``skip``. Fused optimizers skip the step on a GPU without synchronization."""
    if skip is not None:
        if skip.device.type == "cuda" and skips_steps(optimizer) and not any(map(late_hooks, gradients.parameters)):
            optimizer.found_inf = skip.float()  # type: ignore[attr-defined]
        elif skip.item():
            return
    gradients.call_late_hooks()
    optimizer.step()
