"""Detection of non-finite values: decides which updates to skip, and names the stage where the first infinity or NaN arose.

Decisions are flags on the device. Only :meth:`FiniteCheck.settle`, and what calls it, waits for a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite, sqrt
from typing import Any

import torch
from torch import Tensor

from petra.engine.stage import Stage
from petra.engine.update import Part, Pending, scalar, squared_norm
from petra.engine.worker import Worker
from petra.errors import NumericsError
from petra.plan import Plan
from petra.reversible import running_statistics
from petra.specs import Message, Streams
from petra.torch_private import foreach_copy_, foreach_norm, preserve_version_counter
from petra.transport import Port
from petra.transport.port import WrappedPort
from petra.update_rules import UpdateRules

ADVICE = "Lower optim.lr or set optim.clip"
CHECK_EVERY = 50
"""Number of updates after which the host reads their outcomes from a GPU. On the CPU it reads them at every update."""
SUMMED_WHOLE = 2048
"""Largest number of elements that are summed about as fast as a view of some of them is made."""


class FiniteCheck(Part):
    """Detects non-finite values in the updates of one stage, and decides which updates to skip. Comes before the step.

    Args:
        stage: The stage.
        number: Its number, from 1, for messages.
        rules: Whether a non-finite gradient stops the run or skips the update.
        device: Device of the stage's tensors.
        last: Whether the stage receives its gradient from the loss.

    Attributes:
        skipped: Number of skipped updates since the start of training, up to the last :meth:`settle`.
        norms, measured: Sum of the gradient norms of the other updates, and their number, up to the last :meth:`settle`.
        finite: If updates may be skipped, a copy of each running statistic, made when it was last finite after an update.
    """

    def __init__(self, stage: Stage, number: int, rules: UpdateRules, device: torch.device, *, last: bool) -> None:
        self.stage, self.number, self.rules, self.device, self.last = stage, number, rules, device, last
        self.received: list[Tensor] = []  # the sum of each δ received since the last update
        # t of updates, and their numbers for :meth:`record`, which the host has not read
        self.unread: list[tuple[int, Tensor]] = []
        self._failed: tuple[int, bool] | None = None  # t of the first failure, and whether the received gradient was non-finite
        self.skipped = self.norms = self.measured = 0.0
        self.resume({})

    def add_received(self, delta: Streams) -> None:
        """Include a received gradient."""
        self.received += [_sampled_sum(d) for d in delta]

    def sums(self) -> list[Tensor]:
        """Return sums since the last update that replicas all-reduce, so that all of them take the same decision."""
        return [self.sum_received()]

    def set_sums(self, sums: Sequence[Tensor]) -> None:
        """Replace :meth:`sums`."""
        self.received = [sums[0]]

    def run(self, pending: Pending) -> None:
        """Decide whether to skip the step of an update, and raise a failure as soon as the host can know it."""
        self.decide(pending)
        self.clear_sums()
        self._restore_statistics()
        if self.device.type == "cpu" or (pending.done + 1) % CHECK_EVERY == 0:
            self.check()

    def decide(self, pending: Pending) -> None:
        """Set the flag of an update, or leave None if all values are known to be finite."""
        norm, own = pending.squared_clip_norm, pending.squared_norm
        if self.device.type == "cpu":
            value = norm.item()
            own_value = value if own is norm else own.item()
            needed = self.last or not isfinite(value + own_value)  # otherwise, nothing depends on the received gradients
            if self.record(pending.t, value, own_value, self.sum_received().item() if needed else 0.0):
                pending.skip = torch.tensor(True)
            return
        received = self.sum_received()
        self.unread.append((pending.t, torch.stack([norm, own, received])))
        pending.skip = not_finite(norm + received if self.last else norm)

    def settle(self) -> None:
        """Read and count the outcomes of the last updates. Waits for the device."""
        unread, self.unread = self.unread, []
        if unread:
            for (t, _), numbers in zip(unread, torch.stack([row for _, row in unread]).tolist(), strict=True):
                self.record(t, *numbers)

    def record(self, t: int, norm: float, own: float, received: float) -> bool:
        """Count an update after ``t`` microbatches. Return whether it is skipped.

        Args:
            norm, own: Squared norm of the gradient that clipping uses, and of the stage's own gradient.
            received: Sum of the gradients received since the last update.
        """
        others = received if self.last else 0.0
        return self.count(t, own, received, bad=not isfinite(norm + others), fails=not isfinite(own + others))

    def count(self, t: int, own: float, received: float, *, bad: bool, fails: bool) -> bool:
        """Count an update that is skipped if ``bad``, and keep the first that ``fails``. Return ``bad``."""
        if fails and self._failed is None:
            self._failed = t, not (self.last or isfinite(received))
        self.skipped += bad
        if not bad:
            self.norms, self.measured = self.norms + sqrt(own), self.measured + 1
        return bad

    def _restore_statistics(self) -> None:
        """Restore running statistics that are not finite, if updates may be skipped."""
        if self.finite:
            finite = torch.stack(foreach_norm([*self.finite], torch.inf)).isfinite()
            with preserve_version_counter((*self.finite,)):  # stored graphs refer to them, but do not read them
                for (statistic, copy), is_finite in zip(self.finite.items(), finite, strict=True):
                    statistic.copy_(torch.where(is_finite, statistic, copy))
            foreach_copy_([*self.finite.values()], [*self.finite])

    def clear_sums(self) -> None:
        self.received.clear()

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
            f"applied. {ADVICE}, or skip such updates with optim.nonfinite=skip",
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
        received, parameters = self.sum_received(), self.stage.gradients.parameters
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
        """Restore numbers, and discard the sums."""
        self.skipped, self.norms, self.measured = (float(numbers[key]) for key in ("skipped", "norms", "measured"))
        self.clear_sums()

    def tensors(self) -> dict[str, dict[Tensor, Tensor]]:
        return {"method/finite": self.finite}

    def resume(self, tensors: Mapping[str, Mapping[Tensor, Tensor]]) -> None:
        saved, statistics = tensors.get("method/finite", {}), running_statistics(self.stage.module) if self.rules.may_skip else []
        self.finite = {s: saved.get(s, s).clone() for s in statistics}

    def metrics(self) -> dict[str, float]:
        """Return ``gradient_norm``, the mean before clipping over the updates since the last call without skipped ones, and
        ``skipped_updates`` since the start of training."""
        self.settle()
        found = {"gradient_norm": self.norms / max(self.measured, 1), "skipped_updates": self.skipped}
        self.norms = self.measured = 0.0
        return found

    def sum_received(self) -> Tensor:
        return torch.stack(self.received).sum(dtype=torch.float64) if self.received else scalar(0, self.device)


def check_drained(plan: Plan, workers: Mapping[int, Worker], device: torch.device) -> None:
    """Check the values of a drained pipeline: exact streams and non-finite numbers. Every rank must call this function.

    Raises:
        ModelError: If exact streams exceeded the range of the grid at a stage. Raised on every rank.
        NumericsError: If a value is non-finite and the update rules say stop.
    """
    if plan.numerics.exact_streams:
        from petra.engine.options.exact_streams import check_range

        check_range(plan, device, [worker.stage for worker in workers.values()])
    for worker in reversed([*workers.values()]):  # check later stages first: gradients flow upstream
        worker.update[FiniteCheck].check_drained(worker.update.last_t)


class CheckedPort(WrappedPort):
    """Downstream port that passes received gradients to a check."""

    def __init__(self, inner: Port, check: FiniteCheck) -> None:
        super().__init__(inner)
        self._check = check

    def receive(self, m: int) -> Message:
        message = self.inner.receive(m)
        self._check.add_received(message[1])
        return message


def not_finite(total: Tensor) -> Tensor:
    """Return whether a sum is not finite, as a flag on the device."""
    return (total - total) != 0  # NaN unless finite


def _sampled_sum(delta: Tensor) -> Tensor:
    """Return the sum of the first number of each sample. Without a loss scale, non-finite values spread over each sample.

    The sum of all numbers is the faster one for small tensors.
    """
    first = delta if delta.numel() <= SUMMED_WHOLE else delta.as_strided(delta.shape[:1], delta.stride()[:1])
    return first.sum()
