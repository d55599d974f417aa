"""Updates of a stage's weights every k microbatches: a sequence of parts.

A plain run has the parts hooks of parameters, norm, clip, check and step. What only some runs need is a part of its own: the
all-reduce over replicas, which comes first, parts of remedies, before the step, or a moving average, which comes last
(:mod:`petra.engine.options`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor, nn

from petra.engine.accumulation import Accumulation
from petra.engine.stage import Stage
from petra.hooks import Hooks
from petra.torch_private import foreach_mul_, foreach_norm, late_hooks, skips_steps

P = TypeVar("P", bound="Part")
Tensors = Mapping[str, Mapping[Tensor, Tensor]]
"""State of parameters: tensors by kind, then by parameter."""


@dataclass
class Pending:
    """An update in progress.

    Attributes:
        t: Number of microbatches that the stage has processed, including those of the update.
        done: Number of updates before this one, skipped ones included.
        scale: Loss scale of the accumulated gradients; None for 1.
        squared_norm: Squared norm of the stage's accumulated gradient, unscaled, in float64. Set by :class:`Norm`.
        clip_norm: Squared norm to clip by: the stage's, or the whole network's. Set by :class:`Norm`.
        factor: Factor of the gradients; None for 1.
        skip: Flag on the device whether to skip the step; None if all values are known to be finite.
    """

    t: int
    done: int
    squared_norm: Tensor = field(init=False)
    clip_norm: Tensor = field(init=False)
    scale: Tensor | None = None
    factor: Tensor | None = None
    skip: Tensor | None = None


class Part:
    """One part of an update. Parts that keep numbers between updates override the other methods, too."""

    def __call__(self, pending: Pending) -> None:
        """Do this part of an update."""

    def numbers(self) -> dict[str, float]:
        """Return the numbers that a checkpoint contains, by name."""
        return {}

    def tensors(self) -> dict[str, dict[Tensor, Tensor]]:
        """Return the tensors that a checkpoint contains: by kind, then by parameter."""
        return {}

    def load(self, numbers: Mapping[str, float], tensors: Tensors) -> None:
        """Restore the numbers and tensors of a checkpoint. Weights and the parts that come later have been restored."""

    def restart(self) -> None:
        """Forget what depends on earlier weights, which have been replaced."""

    def metrics(self) -> dict[str, float]:
        """Return metrics since the last call, by name."""
        return {}


class ParameterHooks(Part):
    """Calls the hooks of ``register_hook`` with the accumulated gradients.

    Args:
        stage: The stage.
    """

    def __init__(self, stage: Stage) -> None:
        self.stage = stage

    def __call__(self, pending: Pending) -> None:
        self.stage.gradients.call_hooks(pending.scale)


class Norm(Part):
    """Measures the norm of the accumulated gradient.

    Args:
        parameters: Trained parameters of the stage, which may have none.
        device: Their device.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], device: torch.device) -> None:
        self._parameters, self._zero = parameters, torch.zeros((), dtype=torch.float64, device=device)

    def __call__(self, pending: Pending) -> None:
        squared = self._zero
        if self._parameters:
            squared = torch.stack(foreach_norm([p.grad for p in self._parameters])).double().square().sum()
            if pending.scale is not None:
                squared = squared / pending.scale.square()
        pending.squared_norm = pending.clip_norm = squared


class Clip(Part):
    """Clips the gradient by its norm, and divides it by the loss scale.

    Args:
        norm: Largest norm; None leaves gradients as they are.
    """

    def __init__(self, norm: float | None) -> None:
        self._norm = norm

    def __call__(self, pending: Pending) -> None:
        if self._norm is not None:
            pending.factor = (self._norm / (pending.clip_norm.sqrt() + 1e-6)).clamp(max=1.0)
        if pending.scale is not None:  # before the check, which may adapt the scale
            pending.factor = 1 / pending.scale if pending.factor is None else pending.factor / pending.scale


class Step(Part):
    """Runs the optimizer.

    Args:
        index: Index of the stage, from 0, for hooks.
        stage: The stage.
        optimizer: Optimizer of the stage's parameters; None if it has none.
        learning_rate: Maps the number of microbatches that the stage has processed, including those of the update, to the
            learning rate. None keeps the optimizer's own.
        hooks: Hooks to call around the step.
    """

    def __init__(
        self,
        index: int,
        stage: Stage,
        optimizer: torch.optim.Optimizer | None,
        learning_rate: Callable[[int], float] | None,
        hooks: Hooks,
    ) -> None:
        self.index, self.stage, self.optimizer, self.learning_rate = index, stage, optimizer, learning_rate
        self._hooks = hooks

    def __call__(self, pending: Pending) -> None:
        if self.optimizer is None:
            return
        parameters = self.stage.gradients.parameters
        if pending.factor is not None:
            foreach_mul_([p.grad for p in parameters], pending.factor.to(parameters[0].dtype))
        for call in self._hooks.update_begin:
            call(self.index, pending.t - 1)
        with self.stage.updating():
            self.set_learning_rate(pending.t)
            _step(self.optimizer, pending.skip, self.stage.gradients)
        for call in self._hooks.update_end:
            call(self.index, pending.t - 1)

    def tensors(self) -> dict[str, dict[Tensor, Tensor]]:
        found: dict[str, dict[Tensor, Tensor]] = {}
        for p, state in {} if self.optimizer is None else self.optimizer.state.items():
            for key, value in state.items():
                if value is not None:
                    found.setdefault(f"optimizer/{key}", {})[p] = value
        return found

    def load(self, numbers: Mapping[str, float], tensors: Tensors) -> None:
        """Restore the optimizer's state and learning rate.

        torch converts states to the type and device of the parameter, also numbers such as NAdam's product of momenta. The
        optimizer keeps these in float32 on the CPU, and would otherwise round differently and wait for the GPU at each step.
        """
        if self.optimizer is None:
            return
        saved = {kind.removeprefix("optimizer/"): values for kind, values in tensors.items() if kind.startswith("optimizer/")}
        order = [p for group in self.optimizer.param_groups for p in group["params"]]
        states = [{key: values[p] for key, values in saved.items() if p in values} for p in order]
        packed = self.optimizer.state_dict()
        packed["state"] = {i: state for i, state in enumerate(states) if state}
        self.optimizer.load_state_dict(packed)
        for p, state in zip(order, states, strict=True):
            scalars = {key: value.clone() for key, value in state.items() if key != "step" and value.dim() == 0 < p.dim()}
            self.optimizer.state[p].update(scalars)
        if numbers["t"]:
            self.set_learning_rate(int(numbers["t"]))  # weight prediction reads it before the next update

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

    Attributes:
        done: Number of updates, skipped ones included.
        microbatches_done: Number of microbatches that the stage had processed at its last update.
    """

    def __init__(self, parts: Sequence[Part]) -> None:
        self.parts, self.done, self.microbatches_done = list(parts), 0, 0

    def __call__(self, t: int) -> None:
        """Update after microbatch ``t``, counted from 1."""
        self.finish(self.begin(t))

    def begin(self, t: int) -> Pending:
        """Run the parts up to the norm."""
        self.microbatches_done = t
        pending = Pending(t, self.done)
        for part in self.parts[: self._measured()]:
            part(pending)
        return pending

    def finish(self, pending: Pending) -> None:
        """Run the parts after the norm."""
        self.done += 1
        for part in self.parts[self._measured() :]:
            part(pending)

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

    def numbers(self) -> dict[str, float]:
        """Return the numbers that a checkpoint contains, by name."""
        found: dict[str, float] = {"done": self.done, "t": self.microbatches_done}
        return found | {key: value for part in self.parts for key, value in part.numbers().items()}

    def tensors(self) -> dict[str, dict[Tensor, Tensor]]:
        """Return the tensors that a checkpoint contains, by kind and parameter."""
        return {kind: values for part in self.parts for kind, values in part.tensors().items()}

    def load(self, numbers: Mapping[str, float], tensors: Tensors) -> None:
        """Restore what :meth:`numbers` and :meth:`tensors` returned for the same parameters."""
        self.done, self.microbatches_done = int(numbers["done"]), int(numbers["t"])
        for part in reversed(self.parts):  # remedies, which come before the step, read the state of the optimizer
            part.load(numbers, tensors)

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
