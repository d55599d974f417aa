"""Detection of non-finite values: decides which updates to skip, and names the stage where the first infinity or NaN arose.

Decisions are flags on the device. Only :meth:`FiniteCheck.settle`, and what calls it, waits for a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite, sqrt
from typing import NamedTuple

import torch
from torch import Tensor

from petra.engine.stage import Stage
from petra.engine.update import Part, Pending, Tensors
from petra.engine.update_rules import UpdateRules
from petra.errors import NumericsError
from petra.reversible import running_statistics
from petra.specs import Message, Streams
from petra.torch_private import foreach_copy_, foreach_norm, preserve_version_counter
from petra.transport import Port
from petra.transport.port import WrappedPort

ADVICE = "Lower optim.lr or set optim.clip"
CHECK_EVERY = 50
"""Number of updates after which the host reads their outcomes from a GPU. On the CPU it reads them at every update."""

SMALL = 2048
"""Largest number of elements that are summed about as fast as a view of some of them is made."""


class Outcome(NamedTuple):
    """Numbers of one update.

    Attributes:
        t: Number of microbatches that the stage has processed.
        squared_norm: Squared norm of the gradient that clipping uses: the stage's or the whole network's.
        own: Squared norm of the stage's own gradient.
        received: Sum of the gradients received since the last update.
        sent: Sum of the gradients sent since the last update, before the division by the loss scale; 0 without one.
        scale: Loss scale of the accumulation; 1 without one.
    """

    t: int
    squared_norm: float
    own: float
    received: float
    sent: float = 0.0
    scale: float = 1.0


class UpdateLog:
    """Outcomes that the host has not read yet.

    Args:
        capacity: Largest number of outcomes.
        values: Numbers per outcome, besides ``t``: the first of :class:`Outcome`.
        device: Device of the numbers.
    """

    def __init__(self, capacity: int, values: int, device: torch.device) -> None:
        self._rows = torch.zeros((capacity, values), dtype=torch.float64, device=device)
        self._clocks: list[int] = []

    @property
    def full(self) -> bool:
        """Whether :meth:`read` must be called before another outcome is added."""
        return len(self._clocks) == len(self._rows)

    def add(self, t: int, *values: Tensor) -> None:
        """Add the outcome of an update, given its float64 scalars on the device."""
        torch.stack(values, out=self._rows[len(self._clocks)])
        self._clocks.append(t)

    def read(self) -> list[Outcome]:
        """Remove all outcomes and return them, oldest first. Waits for the device unless there are none."""
        clocks, self._clocks = self._clocks, []
        rows = self._rows[: len(clocks)].tolist() if clocks else []
        return [Outcome(t, *row) for t, row in zip(clocks, rows, strict=True)]


class FiniteCheck(Part):
    """Detects non-finite values in the updates of one stage, and decides which updates to skip.

    Args:
        stage: The stage.
        number: Its number, from 1, for messages.
        rules: Whether a non-finite gradient stops the run or skips the update.
        device: Device of the stage's tensors.
        last: Whether the stage receives its gradient from the loss.

    Attributes:
        skipped: Number of skipped updates since the start of training, up to the last :meth:`settle`.
    """

    def __init__(self, stage: Stage, number: int, rules: UpdateRules, device: torch.device, *, last: bool) -> None:
        self.stage, self.number, self.rules, self.device, self.last = stage, number, rules, device, last
        self._received: list[Tensor] = []  # the sum of each δ received since the last update
        self._failed: tuple[int, bool] | None = None  # t of the first failure, and whether the received gradient was non-finite
        self._log = self._make_log()
        self.skipped, self._norms, self._measured = 0.0, 0.0, 0.0  # sum of norms of updates that were not skipped, and their number
        self._statistics = FiniteStatistics(running_statistics(stage.module)) if rules.may_skip else None

    def _make_log(self) -> UpdateLog | None:
        """Return the log of updates that the host reads later; None on the CPU, where reading needs no synchronization."""
        return None if self.device.type == "cpu" else UpdateLog(CHECK_EVERY, 3, self.device)

    def ports(self, upstream: Port, downstream: Port) -> tuple[Port, Port]:
        """Return the ports of the stage with what this check needs to see of their messages."""
        return upstream, CheckedPort(downstream, self)

    def add_received(self, delta: Streams) -> None:
        """Include a received gradient."""
        self._received += [_sampled_sum(d) for d in delta]

    def sums(self) -> list[Tensor]:
        """Return sums since the last update that replicas all-reduce, so that all of them take the same decision."""
        return [self._sum_received()]

    def set_sums(self, sums: Sequence[Tensor]) -> None:
        """Replace :meth:`sums`."""
        self._received = [sums[0]]

    def __call__(self, pending: Pending) -> None:
        """Set the flag of the update, or None if all values are known to be finite."""
        norm, own = pending.clip_norm, pending.squared_norm
        if self._log is None:
            value = norm.item()
            own_value = value if own is norm else own.item()
            needed = self.last or not isfinite(value + own_value)  # otherwise, nothing depends on the received gradients
            outcome = Outcome(pending.t, value, own_value, self._sum_received().item() if needed else 0.0)
            pending.skip = torch.tensor(True) if self._record(outcome) else None
            return
        received = self._sum_received()
        if self._log.full:
            self.settle()
        self._log.add(pending.t, norm, own, received, *self._more())
        pending.skip = self._decide(norm, own, received)

    def _more(self) -> Sequence[Tensor]:
        """Return further numbers for the log."""
        return ()

    def _decide(self, norm: Tensor, own: Tensor, received: Tensor) -> Tensor:
        return self._not_finite(norm, received)

    def _not_finite(self, total: Tensor, received: Tensor) -> Tensor:
        """Return whether an update's gradients are non-finite, as a flag on the device."""
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
        if self._fails(outcome, own, received_finite) and self._failed is None:
            self._failed = outcome.t, not self.last and not received_finite
        self.skipped += bad
        if not bad:
            self._norms, self._measured = self._norms + sqrt(outcome.own), self._measured + 1
        return bad

    def _fails(self, outcome: Outcome, own: bool, received_finite: bool) -> bool:
        """Return whether an update is a failure of this stage: its own gradient is non-finite."""
        return own

    def finish_update(self) -> None:
        """Start the next accumulation. If updates may be skipped, also restore running statistics that are not finite."""
        self._clear_sums()
        if self._statistics is not None:
            self._statistics.restore()

    def _clear_sums(self) -> None:
        self._received.clear()

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
        received, gradients = self._sum_received(), [p.grad for p in self.stage.gradients.parameters]
        norms = torch.stack(foreach_norm(gradients)).double() if gradients else received.new_zeros(1)
        if not (norms.sum() + received.abs()).isfinite():
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

    def numbers(self) -> dict[str, float]:
        self.settle()
        return {"skipped": self.skipped, "norms": self._norms, "measured": self._measured}

    def load(self, numbers: Mapping[str, float], tensors: Tensors) -> None:
        """Restore numbers, discard the sums, and copy running statistics for :meth:`finish_update`."""
        self.skipped, self._norms, self._measured = (numbers[key] for key in ("skipped", "norms", "measured"))
        self._clear_sums()
        if self._statistics is not None:
            self._statistics.copy()

    def metrics(self) -> dict[str, float]:
        """Return ``gradient_norm`` and ``skipped_updates``.

        ``gradient_norm`` is the mean norm before clipping over the updates since the last call, without skipped ones.
        ``skipped_updates`` counts from the start of training.
        """
        self.settle()
        found = {"gradient_norm": self._norms / max(self._measured, 1), "skipped_updates": self.skipped}
        self._norms = self._measured = 0.0
        return found

    def _sum_received(self) -> Tensor:
        return torch.stack(self._received).sum(dtype=torch.float64) if self._received else scalar(0, self.device)


class Settle(Part):
    """Ends an update: starts the next accumulation of a check, and raises its failures as soon as the host can know them."""

    def __init__(self, check: FiniteCheck) -> None:
        self._check = check

    def __call__(self, pending: Pending) -> None:
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


def scalar(value: float, device: torch.device) -> Tensor:
    """Return a float64 tensor with no dimensions."""
    return torch.full((), float(value), dtype=torch.float64, device=device)  # torch.tensor would wait for a GPU
