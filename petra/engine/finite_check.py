"""Detection of non-finite values: decides which updates to skip, and names the stage where the first infinity or NaN arose.

Decisions are flags on the device. Only :meth:`FiniteCheck.check` and :meth:`FiniteCheck.check_drained` wait for a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from math import isfinite

import torch
from torch import Tensor

from petra.engine.loss_scale import LossScale, scalar
from petra.engine.stage import Stage
from petra.engine.update_rules import UpdateRules
from petra.errors import NumericsError
from petra.specs import Streams

ADVICE = "Lower optim.lr or set optim.clip"


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
        skipped: Number of skipped updates since the start of training.
    """

    def __init__(
        self, stage: Stage, rules: UpdateRules, loss_scale: LossScale, *, device: torch.device, number: int, last: bool
    ) -> None:
        self.stage, self.rules, self.loss_scale = stage, rules, loss_scale
        self.device, self.number, self.last = device, number, last
        self.skipped = scalar(0, device)
        self._received: list[Tensor] = []  # the sum of each δ received since the last update
        self._sent = scalar(0, device)  # the sum of all δ sent since the last update; computed only with a loss scale
        self._failed = scalar(0, device)  # code of the first failure (_record_failure), or 0
        self._good_statistics = [(s, s.clone()) for s in _running_statistics(stage)] if rules.may_skip else []

    def add_received(self, delta: Streams) -> None:
        """Include a received gradient, before scaling."""
        if self.loss_scale.scale is None:  # Without a scale, non-finite values spread over each sample, so one number is enough.
            self._received += [d.as_strided(d.shape[:1], d.stride()[:1]).sum() for d in delta]
        else:
            self._received += [d.sum() for d in delta]

    def add_sent(self, delta: Streams) -> None:
        """Include a gradient to be sent, before the division by the scale."""
        if self.loss_scale.scale is not None:
            for d in delta:
                self._sent += d.sum()

    def sums(self) -> tuple[Tensor, Tensor]:
        """Return the sums of received and of sent gradients since the last update, for an all-reduce over replicas."""
        return self._sum_received(), self._sent

    def set_sums(self, received: Tensor, sent: Tensor) -> None:
        """Replace :meth:`sums` by their sums over replicas, so that all replicas take the same decision."""
        self._received, self._sent = [received], sent

    def decide(self, norm: Tensor, squared_norm: Tensor, t: int) -> Tensor | None:
        """Decide whether to skip an update, count it, and adapt a dynamic loss scale.

        Args:
            norm: Norm of the gradient that clipping uses: the stage's or the whole network's.
            squared_norm: Squared norm of the stage's own gradient.
            t: Number of microbatches that the stage has processed.

        Returns:
            A flag on the device, or None if all values are known to be finite.
        """
        received = self._sum_received()
        # On the CPU, reading values needs no synchronization. If all are finite, as usual, there is nothing to decide.
        if self.device.type == "cpu" and self.loss_scale.scale is None and isfinite(norm.item() + received.item()):
            return None
        return self._decide(norm, squared_norm, received.isfinite(), t)

    def _decide(self, norm: Tensor, squared_norm: Tensor, received: Tensor, t: int) -> Tensor:
        """Implement :meth:`decide` on the device. ``received`` is whether all received gradients are finite."""
        scale = self.loss_scale.scale
        bad, own = ~norm.isfinite(), ~squared_norm.isfinite()
        if (
            scale is not None
        ):  # A sent δ can overflow although the parameters' gradients are finite. Only this stage's scale can prevent that.
            sent = ~self._sent.isfinite()
            bad, own = bad | sent, own | sent
        if self.last:
            bad, own = bad | ~received, own | ~received
        failed = own
        if scale is not None and self.loss_scale.dynamic:
            # If the received δ was already non-finite, another stage overflowed, and that stage reduces its scale.
            overflow = own & received
            failed = (overflow & (scale <= 1)) | (~received if self.last else torch.zeros_like(own))
            self.loss_scale.adapt(overflow, bad)
        self.skipped += bad
        self._record_failure(failed, received, t)
        return bad

    def _record_failure(self, failed: Tensor, received: Tensor, t: int) -> None:
        """Record the first failure as one number: 2t if it arose in this stage, 2t + 1 if the received gradient was non-finite."""
        code = 2 * t + (0 if self.last else ~received)
        self._failed = torch.where(failed & (self._failed == 0), code, self._failed)

    def finish_update(self) -> None:
        """Start the next accumulation. If updates may be skipped, also restore running statistics that are not finite."""
        self._received.clear()
        self._sent.zero_()
        for statistic, good in self._good_statistics:
            statistic.copy_(torch.where(statistic.isfinite().all(), statistic, good))
            good.copy_(statistic)

    def restart(self) -> None:
        """Restart after loading a checkpoint: discard the sums, and copy running statistics for :meth:`finish_update`."""
        self._received.clear()
        self._sent.zero_()
        for statistic, good in self._good_statistics:
            good.copy_(statistic)

    def check(self) -> None:
        """Raise the recorded failure, if there is one. Waits for the device.

        Raises:
            NumericsError: If a gradient was non-finite and the rules say stop.
        """
        code = int(self._failed.item()) if self.rules.nonfinite == "stop" else 0
        if not code:
            return
        t, was_received = divmod(code, 2)
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
        statistics = _running_statistics(self.stage)
        if statistics and not torch.stack([s.double().sum() for s in statistics]).isfinite().all():
            raise NumericsError(
                f"stage {self.number}: non-finite running statistics after microbatch {t}; evaluation would be wrong. "
                "Lower optim.lr, or check the data",
                origin=True,
            )

    def _sum_received(self) -> Tensor:
        return torch.stack(self._received).double().sum() if self._received else scalar(0, self.device)


def _running_statistics(stage: Stage) -> list[Tensor]:
    """Return running means and variances, which stay non-finite once a non-finite microbatch has entered them."""
    return [buffer for buffer in stage.module.buffers() if buffer.is_floating_point()]
