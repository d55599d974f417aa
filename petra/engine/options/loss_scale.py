"""Loss scaling inside a stage: keeps small fp16 gradients from underflowing.

A stage multiplies the gradient δ that it receives by its scale and divides the gradient that it sends by the same scale. Gradients
between stages are therefore unscaled, and every stage adapts its scale without communication.
Source: Micikevicius et al. 2018, section 3.2.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from petra.engine.options.finite_check import CHECK_EVERY, FiniteCheck, Outcome, UpdateLog, scalar
from petra.engine.stage import Stage
from petra.engine.update import Part, Pending, Tensors
from petra.engine.update_rules import UpdateRules
from petra.specs import Message, Streams
from petra.transport import Port
from petra.transport.port import WrappedPort

INITIAL_SCALE = 2.0**16
"""First value of a dynamic loss scale."""
GROWTH_INTERVAL = 2000
"""Number of successive updates without an overflow after which a dynamic scale doubles."""


class LossScale(Part):
    """Loss scale of one stage. It is the first part of an update. The check adapts it.

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

    def __call__(self, pending: Pending) -> None:
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

    def numbers(self) -> dict[str, float]:
        return {"good": self.good.item(), "scale": self.scale.item()}

    def load(self, numbers: Mapping[str, float], tensors: Tensors) -> None:
        """Restore saved values. A run without a loss scale has saved none."""
        if "scale" in numbers:
            self.good, self.scale = (scalar(numbers[key], self.good.device) for key in ("good", "scale"))

    def metrics(self) -> dict[str, float]:
        return {"loss_scale": self.scale.item()}


class ScaledCheck(FiniteCheck):
    """Detects non-finite values under a loss scale, and adapts a dynamic one.

    Args:
        stage, number, rules, device, last: As for :class:`petra.engine.options.finite_check.FiniteCheck`.
        loss_scale: The stage's loss scale.
    """

    def __init__(
        self, stage: Stage, number: int, rules: UpdateRules, device: torch.device, loss_scale: LossScale, *, last: bool
    ) -> None:
        super().__init__(stage, number, rules, device, last=last)
        self._loss_scale = loss_scale
        self._sent = scalar(0, device)  # the sum of all δ sent since the last update

    def _make_log(self) -> UpdateLog | None:
        return UpdateLog(CHECK_EVERY, 5, self.device)

    def ports(self, upstream: Port, downstream: Port) -> tuple[Port, Port]:
        """Return ports that scale gradients inside the stage only."""
        upstream, downstream = super().ports(upstream, downstream)
        scale = self._loss_scale
        return ScaledPort(upstream, scale, self, upstream=True), ScaledPort(downstream, scale, self, upstream=False)

    def add_received(self, delta: Streams) -> None:
        self._received += [d.sum() for d in delta]

    def add_sent(self, delta: Streams) -> None:
        """Include a gradient to be sent, before the division by the scale."""
        for d in delta:
            self._sent += d.sum()

    def sums(self) -> list[Tensor]:
        return [*super().sums(), self._sent]

    def set_sums(self, sums: Sequence[Tensor]) -> None:
        super().set_sums(sums)
        self._sent = sums[1]

    def _more(self) -> Sequence[Tensor]:
        return self._sent, self._loss_scale.scale

    def _decide(self, norm: Tensor, own: Tensor, received: Tensor) -> Tensor:
        bad = self._not_finite(norm, received)
        if self._loss_scale.dynamic:
            own_bad = bad if own is norm else self._not_finite(own, received)
            # If the received δ was already non-finite, another stage overflowed, and that stage reduces its scale.
            self._loss_scale.adapt(own_bad & received.isfinite(), bad)
        return bad

    def _not_finite(self, total: Tensor, received: Tensor) -> Tensor:
        # A sent δ can overflow although the parameters' gradients are finite. Only this stage's scale can prevent that.
        return super()._not_finite(total + self._sent, received)

    def _fails(self, outcome: Outcome, own: bool, received_finite: bool) -> bool:
        if not self._loss_scale.dynamic:
            return own
        return (own and received_finite and outcome.scale <= 1) or (self.last and not received_finite)

    def _clear_sums(self) -> None:
        super()._clear_sums()
        self._sent = torch.zeros_like(self._sent)  # the log may refer to the old sum


class ScaledPort(WrappedPort):
    """Port of a stage with a loss scale: received gradients are multiplied by it, and gradients to be sent divided by it.

    Args:
        check: Counts gradients to be sent, before the division.
    """

    def __init__(self, inner: Port, loss_scale: LossScale, check: ScaledCheck, *, upstream: bool) -> None:
        super().__init__(inner)
        self._loss_scale, self._check, self._upstream = loss_scale, check, upstream

    def send(self, m: int, message: Message) -> None:
        if self._upstream:
            x, delta, report = message
            self._check.add_sent(delta)
            message = x, tuple(d / self._loss_scale.scale.to(d.dtype) for d in delta), report
        self.inner.send(m, message)

    def receive(self, m: int) -> Message:
        message = self.inner.receive(m)
        if self._upstream:
            return message
        y, delta, report = message
        return y, tuple(d * self._loss_scale.scale.to(d.dtype) for d in delta), report
