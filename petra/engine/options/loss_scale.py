"""Loss scaling inside a stage: keeps small fp16 gradients from underflowing.

A stage multiplies the gradient δ that it receives by its scale and divides the gradient that it sends by the same scale. Gradients
between stages are therefore unscaled, and every stage adapts its scale without communication.
Source: Micikevicius et al. 2018, section 3.2.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from petra.engine.update import Part, Pending, scalar
from petra.specs import Message, Streams
from petra.transport import Port
from petra.transport.port import WrappedPort

INITIAL_SCALE = 2.0**16
"""First value of a dynamic loss scale."""
GROWTH_INTERVAL = 2000
"""Number of successive updates without an overflow after which a dynamic scale doubles."""


class LossScale(Part):
    """Loss scale of one stage, and the part of its updates that comes before those that use gradients.

    Args:
        setting: A fixed scale, or ``dynamic``.
        device: Device of the stage's tensors.

    Attributes:
        scale: The scale of the current accumulation. A tensor, so that adapting it does not wait for a GPU.
        good: Number of successive updates without a non-finite value.
    """

    def __init__(self, setting: float | Literal["dynamic"], device: torch.device) -> None:
        self.dynamic = setting == "dynamic"
        self.scale = scalar(INITIAL_SCALE if setting == "dynamic" else setting, device)
        self.good = scalar(0, device)

    def run(self, pending: Pending) -> None:
        """Set the scale of the gradients of an update. Its check adapts a dynamic scale for the next one."""
        pending.scale = self.scale

    def adapt(self, overflow: Tensor, bad: Tensor) -> None:
        """Adapt a dynamic scale after an update.

        Args:
            overflow: Whether this stage's own arithmetic overflowed. Halves the scale, down to 1 at least.
            bad: Whether the update is skipped, which restarts the growth interval.
        """
        self.good = torch.where(bad, torch.zeros_like(self.good), self.good + 1)
        grown = torch.where((self.good % GROWTH_INTERVAL == 0) & ~bad, 2 * self.scale, self.scale)
        self.scale = torch.where(overflow, (self.scale / 2).clamp(min=1.0), grown)

    def numbers(self) -> dict[str, Any]:
        return {"good": self.good, "scale": self.scale}

    def load(self, numbers: Mapping[str, Any]) -> None:
        """Restore saved values. A run without a loss scale has saved none."""
        if "scale" in numbers:
            self.good, self.scale = (scalar(numbers[key], self.good.device) for key in ("good", "scale"))

    def metrics(self) -> dict[str, float]:
        return {"loss_scale": self.scale.item()}


class ScaledPort(WrappedPort):
    """Upstream port of a stage with a loss scale: gradients to be sent are passed to ``check``, and divided by the scale."""

    def __init__(self, inner: Port, loss_scale: LossScale, check: Callable[[Streams], None]) -> None:
        super().__init__(inner)
        self._loss_scale, self._check = loss_scale, check

    def send(self, m: int, message: Message) -> None:
        x, delta, report = message
        self._check(delta)
        self.inner.send(m, (x, tuple(d / self._loss_scale.scale.to(d.dtype) for d in delta), report))


class ScalingPort(WrappedPort):
    """Downstream port of a stage with a loss scale: received gradients are multiplied by it."""

    def __init__(self, inner: Port, loss_scale: LossScale) -> None:
        super().__init__(inner)
        self._loss_scale = loss_scale

    def receive(self, m: int) -> Message:
        y, delta, report = self.inner.receive(m)
        return y, tuple(d * self._loss_scale.scale.to(d.dtype) for d in delta), report
