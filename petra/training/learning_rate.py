"""Learning rate schedules. They depend on a stage's own count of microbatches, so they mean the same on every stage."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from petra.errors import Count, Positive, check_types, require


@dataclass(frozen=True)
class Schedule(ABC):
    """Linear warm-up to ``peak`` (Goyal et al. 2017, section 2.2), multiplied by a factor that decreases during the run.

    Attributes:
        peak: Learning rate after the warm-up.
        microbatches_per_epoch: Length of an epoch in microbatches.
        epochs: Length of the run in epochs.
        warmup_epochs: Length of the warm-up in epochs; 0 for no warm-up.

    Raises:
        ConfigError: If a value is out of range.
    """

    peak: Annotated[float, ">= 0"]
    microbatches_per_epoch: Count
    epochs: Count
    warmup_epochs: Annotated[float, ">= 0"] = 0

    def __post_init__(self) -> None:
        check_types(self, "schedule.")

    def __call__(self, t: int) -> float:
        """Return the learning rate of the update after microbatch ``t``, counted from 1."""
        warmup = self.warmup_epochs * self.microbatches_per_epoch
        return self.peak * min(1.0, t / warmup if warmup else 1.0) * self.factor(t - 1)

    @abstractmethod
    def factor(self, done: int) -> float:
        """Return the factor after ``done`` microbatches. It starts at 1."""

    def progress(self, done: int) -> float:
        """Return the progress from the end of the warm-up (0) to the end of the run (1)."""
        start, stop = self.warmup_epochs * self.microbatches_per_epoch, self.epochs * self.microbatches_per_epoch
        return min(1.0, max(0.0, (done - start) / (stop - start))) if stop > start else 0.0


@dataclass(frozen=True)
class MultiStep(Schedule):
    """Multiply by ``gamma`` before each epoch in ``milestones``, counted from 0.

    Attributes:
        milestones: Epochs after which the learning rate is multiplied by ``gamma``, increasing and >= 1.
        gamma: Factor.
    """

    milestones: Sequence[Count] = ()
    gamma: Annotated[float, ">= 0 and <= 1"] = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        increasing = list(self.milestones) == sorted(set(self.milestones)) and min(self.milestones, default=1) >= 1
        require(increasing, "schedule.milestones", "increasing epochs >= 1", list(self.milestones))

    def factor(self, done: int) -> float:
        epoch = done // self.microbatches_per_epoch
        return float(self.gamma ** sum(epoch >= milestone for milestone in self.milestones))


@dataclass(frozen=True)
class Cosine(Schedule):
    """Half a period of the cosine, from 1 to 0 (Loshchilov, Hutter 2017, Eq. 5, without restarts)."""

    def factor(self, done: int) -> float:
        return (1 + math.cos(math.pi * self.progress(done))) / 2


@dataclass(frozen=True)
class Polynomial(Schedule):
    """(1 − progress)^power from the peak to ``final``.

    Attributes:
        power: Exponent; 1 is linear.
        final: Learning rate at the end of the run, at most the peak.
    """

    power: Positive = 2.0
    final: Annotated[float, ">= 0"] = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        expected = f"a number >= 0 and <= {self.peak:g}, the peak learning rate"
        require(self.final <= self.peak, "schedule.final", expected, self.final)

    def factor(self, done: int) -> float:
        decay = (1 - self.progress(done)) ** self.power
        lowest = self.final / self.peak if self.peak else 0.0
        return float(lowest + (1 - lowest) * decay)


def peak_rate(lr: float, batch_size: int, k: int) -> float:
    """Scale the rate for updates of 256 samples to updates of ``batch_size`` · k samples (Goyal et al. 2017, section 2.1)."""
    return lr * batch_size * k / 256
