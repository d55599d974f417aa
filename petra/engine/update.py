"""Updates of a stage's weights every k microbatches: learning rate, clipping, optimizer step.

The loss scale, the moving average and the detection of non-finite values have their own modules. The host waits for a GPU only once
in :data:`petra.engine.finite_check.CHECK_EVERY` updates, unless the optimizer cannot skip a step by a flag on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from petra.engine.averaging import WeightAverage
from petra.engine.finite_check import CHECK_EVERY, FiniteCheck, MeanNorm
from petra.engine.loss_scale import LossScale, scalar
from petra.engine.stage import Stage
from petra.engine.update_rules import UpdateRules
from petra.hooks import Hooks
from petra.specs import Streams
from petra.torch_private import foreach_mul_, foreach_norm, skips_steps

OptimizerFactory = Callable[[nn.Module], torch.optim.Optimizer]
"""Builds the optimizer of a stage's parameters from the module of its blocks."""

AllReduce = Callable[..., tuple[Tensor, ...]]
"""Function of a microbatch and any number of float64 tensors that returns their sums over a stage's replicas."""


class Update:
    """The updates of one stage.

    Args:
        stage: The stage.
        optimizer: Optimizer of the stage's parameters; None if it has none.
        learning_rate: Maps the number of microbatches that the stage has processed, including those of the update, to the
            learning rate. None keeps the optimizer's own.
        rules: Clipping, moving average, loss scale, and the reaction to non-finite gradients.
        device: Device of the stage's tensors.
        number: Number of the stage, from 1, for messages.
        last: Whether the stage receives its gradient from the loss.
        hooks: Hooks to call around the optimizer step and the all-reduce.

    Attributes:
        all_reduce: Waits until the stage's gradients are sums over its replicas, and returns the sums of the given scalars; None
            without replicas.
        done: Number of updates, skipped ones included.
    """

    def __init__(
        self,
        stage: Stage,
        optimizer: torch.optim.Optimizer | None,
        learning_rate: Callable[[int], float] | None = None,
        rules: UpdateRules = UpdateRules(),  # noqa: B008 (frozen)
        *,
        device: torch.device = torch.device("cpu"),  # noqa: B008
        number: int = 1,
        last: bool = True,
        hooks: Hooks | None = None,
    ) -> None:
        self.stage, self.optimizer, self.learning_rate, self.rules = stage, optimizer, learning_rate, rules
        self.device, self.number = device, number
        self.hooks = Hooks() if hooks is None else hooks
        self._blocks = [{n: p for n, p in block.named_parameters() if p.requires_grad} for block in stage.module]
        self._parameters = [p for block in self._blocks for p in block.values()]
        self.all_reduce: AllReduce | None = None
        self._loss_scale = LossScale(rules.loss_scale, device)
        self._average = WeightAverage(self._parameters, rules.average)
        self._finite = FiniteCheck(stage, rules, self._loss_scale, device=device, number=number, last=last)
        self.done = 0
        self._squared_norm = scalar(0, device)
        self._t = 0

    @property
    def scale(self) -> Tensor | None:
        """The current loss scale, or None."""
        return self._loss_scale.scale

    def scaled(self, delta: Streams) -> Streams:
        """Return a received gradient multiplied by the loss scale."""
        self._finite.add_received(delta)
        return delta if self.scale is None else self._loss_scale.multiply(delta)

    def unscaled(self, delta: Streams) -> Streams:
        """Return a gradient to be sent, divided by the loss scale."""
        if self.scale is None:
            return delta
        self._finite.add_sent(delta)
        return self._loss_scale.divide(delta)

    def __call__(self, t: int) -> None:
        """Update after microbatch ``t``, counted from 1. With global clipping, :meth:`apply` is called separately."""
        self._t = t
        if self.all_reduce is not None:
            received, sent = self._finite.sums()
            for call in self.hooks.all_reduce_begin:
                call(self.number - 1, t - 1)
            received, sent, used = self.all_reduce(t - 1, received, sent, self.stage.gradients.used(self.device))
            for call in self.hooks.all_reduce_end:
                call(self.number - 1, t - 1)
            self._finite.set_sums(received, sent)
            self.stage.gradients.add_used(used)
        if not self.rules.clip_globally:
            self.apply(self.squared_norm())

    def squared_norm(self) -> Tensor:
        """Return the squared norm of the accumulated gradient, unscaled, in float64."""
        if self._parameters:
            norms = foreach_norm([p.grad for p in self._parameters])
            self._squared_norm = torch.stack(norms).double().square().sum()
            if self.scale is not None:
                self._squared_norm /= self.scale.square()
        return self._squared_norm

    def apply(self, squared_norm: Tensor) -> None:
        """Update the weights, unless the gradient is non-finite.

        Args:
            squared_norm: Squared norm of the gradient to clip by: the stage's, or the whole network's.
        """
        factor = self._factor(squared_norm)  # uses the scale of this accumulation, which the next line may adapt
        bad = self._finite.decide(squared_norm, self._squared_norm, self._t)
        if self._parameters:
            if factor is not None:
                foreach_mul_([p.grad for p in self._parameters], factor.to(self._parameters[0].dtype))
            for call in self.hooks.update_begin:
                call(self.number - 1, self._t - 1)
            with self.stage.updating():
                assert self.optimizer is not None
                self._set_learning_rate(self.optimizer)
                _step(self.optimizer, bad, self.device)
            for call in self.hooks.update_end:
                call(self.number - 1, self._t - 1)
        self._average.update(self.done)
        self.done += 1
        self._finite.finish_update()
        if self.device.type == "cpu" or self.done % CHECK_EVERY == 0:
            self._finite.check()

    def _factor(self, squared_norm: Tensor) -> Tensor | None:
        """Return the factor that unscales and clips the gradients; None if both are off."""
        clip = None if self.rules.clip is None else (self.rules.clip / (squared_norm.sqrt() + 1e-6)).clamp(max=1.0)
        if self.scale is None:
            return clip
        return 1 / self.scale if clip is None else clip / self.scale

    def _set_learning_rate(self, optimizer: torch.optim.Optimizer) -> None:
        """Set the optimizer's learning rate for an update after ``_t`` microbatches."""
        if self.learning_rate is not None:
            rate = self.learning_rate(self._t)
            for group in optimizer.param_groups:
                group["lr"] = rate

    def check_drained(self) -> None:
        """Check for non-finite values after the pipeline has drained; see :meth:`FiniteCheck.check_drained`.

        Raises:
            NumericsError: If a value is non-finite and the rules say stop.
        """
        self._finite.check_drained(self.squared_norm, self._t)

    def averaged(self) -> AbstractContextManager[None]:
        """Replace the stage's parameters by their moving averages, if there are any, inside the ``with`` block."""
        return self._average.swapped()

    def restart_averages(self) -> None:
        """Set the moving averages to the current weights."""
        self._average.restart()

    def metrics(self) -> dict[str, float]:
        """Return ``gradient_norm``, ``skipped_updates`` and, with a loss scale, ``loss_scale``.

        ``gradient_norm`` is the mean norm before clipping over the updates since the last call, without skipped ones.
        ``skipped_updates`` counts from the start of training.
        """
        self._finite.settle()
        found = {"gradient_norm": self._finite.norms.value(), "skipped_updates": self._finite.skipped}
        if self.scale is not None:
            found["loss_scale"] = self.scale.item()
        self._finite.norms = MeanNorm()
        return found

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint.

        Returns:
            ``stage``: numbers of the stage. ``blocks``: for each block, by parameter name, the ``optimizer`` state, the moving
            ``average`` and the accumulated ``gradient``, unscaled.
        """
        self._finite.settle()
        numbers = {
            "good": self._loss_scale.good,
            "skipped": self._finite.skipped,
            "scale": self.scale,
            "done": self.done,
            "t": self._t,
            "norms": self._finite.norms.total,
            "measured": self._finite.norms.count,
        }
        return {
            "stage": {key: value.item() if isinstance(value, Tensor) else value for key, value in numbers.items()},
            "blocks": _block_states(self._blocks, self.optimizer, self._average.values, self.scale),
        }

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a :meth:`state_dict` of the same blocks. Weights are not part of it."""
        numbers, names = state["stage"], [n for block in self._blocks for n in block]
        self._loss_scale.load(numbers["good"], numbers["scale"])
        self._finite.skipped = float(numbers["skipped"])
        self._finite.norms = MeanNorm(float(numbers["norms"]), float(numbers["measured"]))
        self.done, self._t = int(numbers["done"]), int(numbers["t"])
        owners = [saved for block, saved in zip(self._blocks, state["blocks"], strict=True) for _ in block]
        if self.optimizer is not None:
            saved: dict[Tensor, Any] = {p: o["optimizer"][n] for p, o, n in zip(self._parameters, owners, names, strict=True)}
            _load_optimizer(self.optimizer, saved)
            if self._t:
                self._set_learning_rate(self.optimizer)  # weight prediction reads it before the next update
        for average, owner, name in zip(self._average.values, owners, names, strict=bool(self._average.values)):
            if name in owner["average"]:  # otherwise the average begins with the weights
                average.copy_(owner["average"][name])
        for parameter, owner, name in zip(self._parameters, owners, names, strict=True):
            assert parameter.grad is not None
            gradient = owner["gradient"][name].to(parameter.grad)
            parameter.grad.copy_(gradient if self.scale is None else gradient * self.scale)
        self.stage.gradients.restore_used()
        self._finite.restart()


def _step(optimizer: torch.optim.Optimizer, bad: Tensor | None, device: torch.device) -> None:
    """Run the optimizer, unless ``bad``. Fused optimizers skip the step on a GPU without synchronization."""
    if bad is None:
        optimizer.step()
        return
    if device.type == "cuda" and skips_steps(optimizer):
        optimizer.found_inf = bad.float()  # type: ignore[attr-defined]
    elif bad.item():
        return
    optimizer.step()


def _block_states(
    blocks: Sequence[Mapping[str, nn.Parameter]],
    optimizer: torch.optim.Optimizer | None,
    averages: Sequence[Tensor],
    scale: Tensor | None,
) -> list[dict[str, Any]]:
    """Return the part of :meth:`Update.state_dict` that belongs to each block."""
    average = iter(averages)
    return [
        {
            "optimizer": {n: dict(optimizer.state[p]) for n, p in block.items()} if optimizer else {},
            "average": {n: next(average) for n in block} if averages else {},
            "gradient": {
                n: p.grad if scale is None else (p.grad / scale).to(p.dtype) for n, p in block.items() if p.grad is not None
            },
        }
        for block in blocks
    ]


def _load_optimizer(optimizer: torch.optim.Optimizer, saved: Mapping[Tensor, Any]) -> None:
    """Restore an optimizer's state from that of each parameter.

    torch converts states to the type and device of the parameter, also numbers such as NAdam's product of momenta. The optimizer
    keeps these in float32 on the CPU, and would otherwise round differently and wait for the GPU at each step.
    """
    packed = optimizer.state_dict()
    order = [p for group in optimizer.param_groups for p in group["params"]]
    packed["state"] = {i: saved[p] for i, p in enumerate(order) if saved[p]}
    optimizer.load_state_dict(packed)
    for p in order:
        numbers = {n: v for n, v in saved[p].items() if n != "step" and isinstance(v, Tensor) and v.dim() == 0 < p.dim()}
        optimizer.state[p].update({name: value.clone() for name, value in numbers.items()})
