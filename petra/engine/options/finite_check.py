"""Detection of non-finite values: decides which updates to skip, and names the stage where the first infinity or NaN arose.

Decisions are flags on the device. Only :meth:`FiniteCheck.settle`, and what calls it, waits for a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite, sqrt
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from petra.engine.stage import Stage
from petra.engine.update import Part, Pending, scalar, squared_norm
from petra.engine.update_rules import UpdateRules
from petra.errors import NumericsError
from petra.reversible import running_statistics
from petra.specs import Message, Streams
from petra.torch_private import foreach_copy_, foreach_norm, preserve_version_counter
from petra.transport import Port
from petra.transport.port import WrappedPort

if TYPE_CHECKING:
    from petra.engine.options.loss_scale import LossScale

ADVICE = "Lower optim.lr or set optim.clip"
CHECK_EVERY = 50
"""Number of updates after which the host reads their outcomes from a GPU. On the CPU it reads them at every update."""

SMALL = 2048
"""Largest number of elements that are summed about as fast as a view of some of them is made."""


class FiniteCheck(Part):
    """Detects non-finite values in the updates of one stage, decides which updates to skip, and adapts a dynamic loss scale.

    Args:
        stage: The stage.
        number: Its number, from 1, for messages.
        rules: Whether a non-finite gradient stops the run or skips the update.
        device: Device of the stage's tensors.
        last: Whether the stage receives its gradient from the loss.
        loss_scale: Loss scale of the stage, or None.

    Attributes:
        skipped: Number of skipped updates since the start of training, up to the last :meth:`settle`.
        norms, measured: Sum of the gradient norms of the other updates, and their number, up to the last :meth:`settle`.
    """

    def __init__(
        self,
        stage: Stage,
        number: int,
        rules: UpdateRules,
        device: torch.device,
        *,
        last: bool,
        loss_scale: LossScale | None = None,
    ) -> None:
        self.stage, self.number, self.rules, self.device, self.last = stage, number, rules, device, last
        self._loss_scale = loss_scale
        self._received: list[Tensor] = []  # the sum of each δ received since the last update
        self._sent = scalar(0, device)  # with a loss scale, the sum of all δ sent since the last update, before the division
        self._unread: list[tuple[int, Tensor]] = []  # t of updates, and their numbers for _record, which the host has not read
        self._failed: tuple[int, bool] | None = None  # t of the first failure, and whether the received gradient was non-finite
        self.skipped = self.norms = self.measured = 0.0
        self._statistics = running_statistics(stage.module) if rules.may_skip else []
        self._finite = [s.clone() for s in self._statistics]  # when they were last finite

    def add_received(self, delta: Streams) -> None:
        """Include a received gradient."""
        self._received += [_sampled_sum(d) if self._loss_scale is None else d.sum() for d in delta]

    def add_sent(self, delta: Streams) -> None:
        """Include a gradient to be sent, before the division by the loss scale."""
        for d in delta:
            self._sent += d.sum()

    def sums(self) -> list[Tensor]:
        """Return sums since the last update that replicas all-reduce, so that all of them take the same decision."""
        return [self._sum_received()] if self._loss_scale is None else [self._sum_received(), self._sent]

    def set_sums(self, sums: Sequence[Tensor]) -> None:
        """Replace :meth:`sums`."""
        self._received = [sums[0]]
        if self._loss_scale is not None:
            self._sent = sums[1]

    def run(self, pending: Pending) -> None:
        """Set the flag of the update, or None if all values are known to be finite."""
        norm, own, scale = pending.clip_norm, pending.squared_norm, self._loss_scale
        if self.device.type == "cpu" and scale is None:
            value = norm.item()
            own_value = value if own is norm else own.item()
            needed = self.last or not isfinite(value + own_value)  # otherwise, nothing depends on the received gradients
            bad = self._record(pending.t, value, own_value, self._sum_received().item() if needed else 0.0)
            pending.skip = torch.tensor(True) if bad else None
            return
        received = self._sum_received()
        scaled = [] if scale is None else [self._sent, scale.scale]
        self._unread.append((pending.t, torch.stack([norm, own, received, *scaled])))
        pending.skip = overflow = self._not_finite(norm, received)
        if scale is not None and scale.dynamic:
            own_overflow = overflow if own is norm else self._not_finite(own, received)
            # If the received δ was already non-finite, another stage overflowed, and that stage reduces its scale.
            scale.adapt(own_overflow & received.isfinite(), overflow)

    def _not_finite(self, total: Tensor, received: Tensor) -> Tensor:
        """Return whether an update's gradients are non-finite, as a flag on the device."""
        if self._loss_scale is not None:  # a sent δ can overflow although gradients are finite; only this scale can prevent it
            total = total + self._sent
        if self.last:
            total = total + received
        return (total - total) != 0  # NaN unless finite

    def settle(self) -> None:
        """Read and count the outcomes of the last updates. Waits for the device."""
        unread, self._unread = self._unread, []
        if unread:
            for (t, _), numbers in zip(unread, torch.stack([row for _, row in unread]).tolist(), strict=True):
                self._record(t, *numbers)

    def _record(self, t: int, norm: float, own: float, received: float, sent: float = 0.0, scale: float = 1.0) -> bool:
        """Count an update and record the first failure. Return whether the update is skipped.

        Args:
            t: Number of microbatches that the stage has processed.
            norm, own: Squared norm of the gradient that clipping uses, and of the stage's own gradient.
            received, sent: Sums of the gradients received and sent since the last update.
            scale: Loss scale of the accumulation.
        """
        received_finite = isfinite(received)
        others_finite = isfinite(sent) and (received_finite or not self.last)
        bad, fails = (not (isfinite(value) and others_finite) for value in (norm, own))
        if self._loss_scale is not None and self._loss_scale.dynamic:
            fails = (fails and received_finite and scale <= 1) or (self.last and not received_finite)
        if fails and self._failed is None:
            self._failed = t, not self.last and not received_finite
        self.skipped += bad
        if not bad:
            self.norms, self.measured = self.norms + sqrt(own), self.measured + 1
        return bad

    def finish_update(self) -> None:
        """Start the next accumulation. If updates may be skipped, also restore running statistics that are not finite."""
        self._clear_sums()
        if self._statistics:
            finite = torch.stack(foreach_norm(self._statistics, torch.inf)).isfinite()
            with preserve_version_counter(tuple(self._statistics)):  # stored graphs refer to them, but do not read them
                for statistic, copy, is_finite in zip(self._statistics, self._finite, finite, strict=True):
                    statistic.copy_(torch.where(is_finite, statistic, copy))
            foreach_copy_(self._finite, self._statistics)

    def _clear_sums(self) -> None:
        self._received.clear()
        if self._loss_scale is not None:
            self._sent = scalar(0, self.device)  # unread numbers may refer to the old sum

    def check(self) -> None:
        """Raise the recorded failure, if there is one. Waits for the device.

        Raises:
            NumericsError: If a gradient was non-finite and the rules say stop.
        """
        self.settle()
        if self.rules.nonfinite != "stop" or self._failed is None:
            return
        t, was_received = self._failed
        what = "loss or gradient" if self.last else "gradient"
        source = f", received from stage {self.number + 1}" if was_received else ""
        raise NumericsError(
            f"stage {self.number}: non-finite {what} in the update after microbatch {t}{source}; the update was not "
            f"applied. {ADVICE}, or skip such updates with trainer.nonfinite=skip",
            origin=not was_received,
        )

    def check_drained(self, t: int) -> None:
        """Check what a checkpoint would save: weights, the gradient accumulated so far, and running statistics.

        If updates may be skipped, check only for failed updates, because the next update discards or restores the rest. Waits for
        the device.

        Args:
            t: Number of microbatches that the stage had processed at its last update.

        Raises:
            NumericsError: If a value is non-finite and the rules say stop.
        """
        self.check()
        if self.rules.may_skip:
            return
        received, parameters = self._sum_received(), self.stage.gradients.parameters
        if not (received.abs() + squared_norm(parameters) if parameters else received).isfinite():
            raise NumericsError(
                f"stage {self.number}: non-finite gradient in the accumulation that began after microbatch {t}; "
                f"the update was not applied. {ADVICE}",
                origin=bool(received.isfinite()),
            )
        statistics = running_statistics(self.stage.module)
        if statistics and not torch.stack([s.double().sum() for s in statistics]).isfinite().all():
            raise NumericsError(
                f"stage {self.number}: non-finite running statistics after microbatch {t}; evaluation would be wrong. "
                "Lower optim.lr, or check the data",
                origin=True,
            )

    def numbers(self) -> dict[str, Any]:
        self.settle()
        return {"skipped": self.skipped, "norms": self.norms, "measured": self.measured}

    def load(self, numbers: Mapping[str, Any]) -> None:
        """Restore numbers, discard the sums, and copy running statistics for :meth:`finish_update`."""
        self.skipped, self.norms, self.measured = (float(numbers[key]) for key in ("skipped", "norms", "measured"))
        self._clear_sums()
        self._finite = [s.clone() for s in self._statistics]

    def metrics(self) -> dict[str, float]:
        """Return ``gradient_norm`` and ``skipped_updates``.

        ``gradient_norm`` is the mean norm before clipping over the updates since the last call, without skipped ones.
        ``skipped_updates`` counts from the start of training.
        """
        self.settle()
        found = {"gradient_norm": self.norms / max(self.measured, 1), "skipped_updates": self.skipped}
        self.norms = self.measured = 0.0
        return found

    def _sum_received(self) -> Tensor:
        return torch.stack(self._received).sum(dtype=torch.float64) if self._received else scalar(0, self.device)


class Settle(Part):
    """Ends an update: starts the next accumulation of a check, and raises its failures as soon as the host can know them."""

    def __init__(self, check: FiniteCheck) -> None:
        self._check = check

    def run(self, pending: Pending) -> None:
        self._check.finish_update()
        if self._check.device.type == "cpu" or (pending.done + 1) % CHECK_EVERY == 0:
            self._check.check()


class CheckedPort(WrappedPort):
    """Downstream port that passes received gradients to a check."""

    def __init__(self, inner: Port, check: FiniteCheck) -> None:
        super().__init__(inner)
        self._check = check

    def receive(self, m: int) -> Message:
        message = self.inner.receive(m)
        self._check.add_received(message[1])
        return message


def _sampled_sum(delta: Tensor) -> Tensor:
    """Return the sum of the first number of each sample. Without a loss scale, non-finite values spread over each sample.

    The sum of all numbers is the faster one for small tensors.
    """
    first = delta if delta.numel() <= SMALL else delta.as_strided(delta.shape[:1], delta.stride()[:1])
    return first.sum()
