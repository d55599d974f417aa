"""Detection of non-finite values: decides which updates to skip, and names the stage where the first infinity or NaN arose.

Decisions are flags on the device. Only :meth:`FiniteCheck.settle`, and what calls it, waits for a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import isfinite, sqrt

import torch
from torch import Tensor

from petra.engine.loss_scale import LossScale, scalar
from petra.engine.stage import Stage
from petra.engine.update_log import Outcome, UpdateLog
from petra.engine.update_rules import UpdateRules
from petra.errors import NumericsError
from petra.reversible import running_statistics
from petra.specs import Streams
from petra.torch_private import foreach_copy_, foreach_norm, preserve_version_counter

ADVICE = "Lower optim.lr or set optim.clip"
CHECK_EVERY = 50
"""Number of updates after which the host reads their outcomes from a GPU. On the CPU it reads them at every update."""

SMALL = 2048
"""Largest number of elements that are summed about as fast as a view of some of them is made."""


@dataclass
class MeanNorm:
    """Mean gradient norm of the updates that were not skipped."""

    total: float = 0.0
    count: float = 0.0

    def add(self, norm: float) -> None:
        """Include the norm of an update."""
        self.total, self.count = self.total + norm, self.count + 1

    def value(self) -> float:
        """Return the mean, 0 without any update."""
        return self.total / max(self.count, 1)


class FiniteCheck:
    """Detects non-finite values in the updates of one stage.

    Args:
        stage: The stage.
        rules: Whether a non-finite gradient stops the run or skips the update.
        loss_scale: The stage's loss scale, which is adapted after an overflow.
        device: Device of the stage's tensors.
        number: Number of the stage, from 1, for messages.
        last: Whether the stage receives its gradient from the loss.

    Attributes:
        skipped: Number of skipped updates since the start of training, up to the last :meth:`settle`.
        norms: Mean norm of the gradients of updates that were not skipped, up to the last :meth:`settle`.
    """

    def __init__(
        self, stage: Stage, rules: UpdateRules, loss_scale: LossScale, *, device: torch.device, number: int, last: bool
    ) -> None:
        self.stage, self.rules, self.loss_scale = stage, rules, loss_scale
        self.device, self.number, self.last = device, number, last
        self._received: list[Tensor] = []  # the sum of each δ received since the last update
        self._sent = scalar(0, device)  # the sum of all δ sent since the last update; computed only with a loss scale
        self._failed: tuple[int, bool] | None = None  # t of the first failure, and whether the received gradient was non-finite
        values = 3 if loss_scale.scale is None else 5
        on_cpu = device.type == "cpu" and loss_scale.scale is None
        self._log = None if on_cpu else UpdateLog(CHECK_EVERY, values, device)
        self.skipped, self.norms = 0.0, MeanNorm()
        self._statistics = FiniteStatistics(running_statistics(stage.module)) if rules.may_skip else None

    def add_received(self, delta: Streams) -> None:
        """Include a received gradient, before scaling."""
        if self.loss_scale.scale is None:
            self._received += [_sampled_sum(d) for d in delta]
        else:
            self._received += [d.sum() for d in delta]

    def add_sent(self, delta: Streams) -> None:
        """Include a gradient to be sent, before the division by the scale. Called only if there is a scale."""
        for d in delta:
            self._sent += d.sum()

    def sums(self) -> tuple[Tensor, Tensor]:
        """Return the sums of received and of sent gradients since the last update, for an all-reduce over replicas."""
        return self._sum_received(), self._sent

    def set_sums(self, received: Tensor, sent: Tensor) -> None:
        """Replace :meth:`sums` by their sums over replicas, so that all replicas take the same decision."""
        self._received, self._sent = [received], sent

    def decide(self, squared_norm: Tensor, own: Tensor, t: int) -> Tensor | None:
        """Decide whether to skip an update, and adapt a dynamic loss scale.

        Args:
            squared_norm: Squared norm of the gradient that clipping uses: the stage's or the whole network's.
            own: Squared norm of the stage's own gradient.
            t: Number of microbatches that the stage has processed.

        Returns:
            A flag on the device, or None if all values are known to be finite.
        """
        if self._log is None:  # reading a value on the CPU needs no synchronization
            norm = squared_norm.item()
            own_norm = norm if own is squared_norm else own.item()
            needed = self.last or not isfinite(norm + own_norm)  # otherwise, nothing depends on the received gradients
            outcome = Outcome(t, norm, own_norm, self._sum_received().item() if needed else 0.0)
            return torch.tensor(True) if self._record(outcome) else None
        received, scale = self._sum_received(), self.loss_scale.scale
        if self._log.full:
            self.settle()
        self._log.add(t, squared_norm, own, received, *(() if scale is None else (self._sent, scale)))
        bad = self._not_finite(squared_norm, received)
        if scale is not None and self.loss_scale.dynamic:
            own_bad = bad if own is squared_norm else self._not_finite(own, received)
            # If the received δ was already non-finite, another stage overflowed, and that stage reduces its scale.
            self.loss_scale.adapt(own_bad & received.isfinite(), bad)
        return bad

    def _not_finite(self, squared_norm: Tensor, received: Tensor) -> Tensor:
        """Return whether an update's gradients are non-finite, as a flag on the device."""
        total = squared_norm
        if self.loss_scale.scale is not None:
            # A sent δ can overflow although the parameters' gradients are finite. Only this stage's scale can prevent that.
            total = total + self._sent
        if self.last:
            total = total + received
        return (total - total) != 0  # NaN unless finite

    def settle(self) -> None:
        """Read and count the outcomes of the last updates. Waits for the device."""
        if self._log is not None:
            for outcome in self._log.read():
                self._record(outcome)

    def _record(self, outcome: Outcome) -> bool:
        """Count an update and record the first failure. Return whether the update is skipped."""
        received_finite = isfinite(outcome.received)
        others_finite = isfinite(outcome.sent) and (received_finite or not self.last)
        bad, own = (not (isfinite(value) and others_finite) for value in (outcome.squared_norm, outcome.own))
        failed = own
        if self.loss_scale.dynamic:
            failed = (own and received_finite and outcome.scale <= 1) or (self.last and not received_finite)
        if failed and self._failed is None:
            self._failed = outcome.t, not self.last and not received_finite
        self.skipped += bad
        if not bad:
            self.norms.add(sqrt(outcome.own))
        return bad

    def finish_update(self) -> None:
        """Start the next accumulation. If updates may be skipped, also restore running statistics that are not finite."""
        self._clear_sums()
        if self._statistics is not None:
            self._statistics.restore()

    def restart(self) -> None:
        """Restart after loading a checkpoint: discard the sums, and copy running statistics for :meth:`finish_update`."""
        self._clear_sums()
        if self._statistics is not None:
            self._statistics.copy()

    def _clear_sums(self) -> None:
        self._received.clear()
        if self.loss_scale.scale is not None:
            self._sent = torch.zeros_like(self._sent)  # the log may refer to the old sum

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
            f"stage {self.number}: non-finite {what} in the update after microbatch {t}{source}; the update was not applied. "
            f"{ADVICE}, or skip such updates with trainer.nonfinite=skip",
            origin=not was_received,
        )

    def check_drained(self, squared_norm: Callable[[], Tensor], t: int) -> None:
        """Check what a checkpoint would save: weights, the gradient accumulated so far, and running statistics.

        If updates may be skipped, check only for failed updates, because the next update discards or restores the rest. Waits for
        the device.

        Args:
            squared_norm: Returns the squared norm of the gradient accumulated so far.
            t: Number of microbatches that the stage had processed at its last update.

        Raises:
            NumericsError: If a value is non-finite and the rules say stop.
        """
        self.check()
        if self.rules.may_skip:
            return
        received = self._sum_received()
        if not (squared_norm() + received.abs()).isfinite():
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

    def _sum_received(self) -> Tensor:
        return torch.stack(self._received).sum(dtype=torch.float64) if self._received else scalar(0, self.device)


class FiniteStatistics:
    """Copies of running statistics, taken when they were last finite. All of them are handled by a few kernels."""

    def __init__(self, statistics: list[Tensor]) -> None:
        self._statistics = statistics
        self._sizes = [s.numel() for s in statistics]
        if statistics:
            owners = torch.repeat_interleave(torch.arange(len(statistics)), torch.tensor(self._sizes))
            self._owners = owners.to(statistics[0].device)
            self.copy()

    def copy(self) -> None:
        """Copy all statistics, which must be finite."""
        if self._statistics:
            self._finite = self._joint()

    def restore(self) -> None:
        """Replace each statistic that has a non-finite value by its copy, and copy the others."""
        if self._statistics:
            largest = torch.stack(foreach_norm(self._statistics, torch.inf))
            self._finite = torch.where(largest.isfinite()[self._owners], self._joint(), self._finite)
            with preserve_version_counter(tuple(self._statistics)):  # stored graphs refer to them, but do not read them
                foreach_copy_(self._statistics, torch.split(self._finite, self._sizes))

    def _joint(self) -> Tensor:
        return torch.cat([s.flatten() for s in self._statistics])


def _sampled_sum(delta: Tensor) -> Tensor:
    """Return the sum of the first number of each sample. Without a loss scale, non-finite values spread over each sample.

    The sum of all numbers is the faster one for small tensors.
    """
    first = delta if delta.numel() <= SMALL else delta.as_strided(delta.shape[:1], delta.stride()[:1])
    return first.sum()
