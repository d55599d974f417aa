"""Loss scaling inside a stage: keeps small fp16 gradients from underflowing.

A stage multiplies the gradient δ that it receives by its scale and divides the gradient that it sends by the same scale. Gradients
between stages are therefore unscaled, and every stage adapts its scale without communication.
Source: Micikevicius et al. 2018, section 3.2.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Any, Literal

import torch
from torch import Tensor

from petra.engine.options.finite_check import FiniteCheck, not_finite
from petra.engine.update import Part, Pending, scalar
from petra.specs import Message, Streams
from petra.transport import Port
from petra.transport.port import WrappedPort

INITIAL_SCALE = 2.0**16
"""First value of a dynamic loss scale."""
GROWTH_INTERVAL = 2000
"""Number of successive updates without an overflow after which a dynamic scale doubles."""


class LossScale(Part):
    """Loss scale of one stage, and the part of its updates that comes after the norm, which it divides by the scale.

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
        pending.squared_norm = pending.squared_clip_norm = pending.squared_norm / self.scale.square()

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
        """Restore the values of a dynamic scale. A run without a loss scale has saved none."""
        if self.dynamic and "scale" in numbers:
            self.good, self.scale = (scalar(numbers[key], self.good.device) for key in ("good", "scale"))

    def metrics(self) -> dict[str, float]:
        return {"loss_scale": self.scale.item()}


class ScaledCheck(FiniteCheck):
    """Finite check of a stage with a loss scale. Adapts a dynamic one for the next update, after it has removed it from this one.

    A gradient that the stage sends can overflow although those of its weights are finite, and only its scale can prevent it.

    Args:
        loss_scale: The scale.
        check: Arguments of :class:`FiniteCheck`.
    """

    def __init__(self, loss_scale: LossScale, *check: Any, last: bool) -> None:
        super().__init__(*check, last=last)
        self._loss_scale, self._sent = loss_scale, scalar(0, self.device)  # the sum of all δ sent, before the division

    def add_received(self, delta: Streams) -> None:
        self.received += [d.sum() for d in delta]

    def add_sent(self, delta: Streams) -> None:
        """Include a gradient to be sent, before the division by the loss scale."""
        for d in delta:
            self._sent += d.sum()

    def sums(self) -> list[Tensor]:
        return [self.sum_received(), self._sent]

    def set_sums(self, sums: Sequence[Tensor]) -> None:
        received, self._sent = sums
        self.received = [received]

    def decide(self, pending: Pending) -> None:
        scale = self._loss_scale.scale  # removed in one multiplication with clipping, which comes before
        pending.factor = 1 / scale if pending.factor is None else pending.factor / scale
        norm, own, received = pending.squared_clip_norm, pending.squared_norm, self.sum_received()
        self.unread.append((pending.t, torch.stack([norm, own, received, self._sent, scale])))
        others = self._sent + received if self.last else self._sent
        pending.skip = bad = not_finite(norm + others)
        if self._loss_scale.dynamic:
            # If the received δ was already non-finite, another stage overflowed, and that stage reduces its scale.
            self._loss_scale.adapt((bad if own is norm else not_finite(own + others)) & received.isfinite(), bad)

    def record(self, t: int, norm: float, own: float, received: float, sent: float = 0.0, scale: float = 1.0) -> bool:
        others = sent + received if self.last else sent
        fails = not isfinite(own + others)
        if self._loss_scale.dynamic:
            fails = (self.last and not isfinite(received)) or (fails and isfinite(received) and scale <= 1)
        return self.count(t, own, received, bad=not isfinite(norm + others), fails=fails)

    def clear_sums(self) -> None:
        super().clear_sums()
        self._sent = scalar(0, self.device)  # unread numbers may refer to the old sum


class ScaledPort(WrappedPort):
    """Upstream port of a stage with a loss scale: gradients to be sent are included in the check, and divided by the scale."""

    def __init__(self, inner: Port, loss_scale: LossScale, check: ScaledCheck) -> None:
        super().__init__(inner)
        self._loss_scale, self._check = loss_scale, check

    def send(self, m: int, message: Message) -> None:
        x, delta, report = message
        self._check.add_sent(delta)
        self.inner.send(m, (x, tuple(d / self._loss_scale.scale.to(d.dtype) for d in delta), report))


class ScalingPort(WrappedPort):
    """Downstream port of a stage with a loss scale: received gradients are multiplied by it."""

    def __init__(self, inner: Port, loss_scale: LossScale) -> None:
        super().__init__(inner)
        self._loss_scale = loss_scale

    def receive(self, m: int) -> Message:
        y, delta, report = self.inner.receive(m)
        return y, tuple(d * self._loss_scale.scale.to(d.dtype) for d in delta), report
