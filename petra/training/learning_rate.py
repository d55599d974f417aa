"""The learning rate as a function of the microbatches that a stage has done, so that it means the same on every stage."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from petra.errors import ConfigError


@dataclass(frozen=True)
class Schedule(ABC):
    """Linear warm-up to ``peak`` (Goyal et al. 2017, section 2.2), times a factor that falls over the run.

    Attributes:
        peak: learning rate after the warm-up.
        microbatches_per_epoch: length of an epoch.
        epochs: length of the run.
        warmup_epochs: length of the warm-up in epochs; 0 for none.

    Raises:
        ConfigError: a value out of range.
    """

    peak: float
    microbatches_per_epoch: int
    epochs: int
    warmup_epochs: float = 0

    def __post_init__(self) -> None:
        if not self.peak >= 0:
            raise ConfigError(f"optim.lr: found {self.peak}, accepted are numbers >= 0")
        if not 0 <= self.warmup_epochs < math.inf:
            raise ConfigError(f"schedule.warmup_epochs: found {self.warmup_epochs}, accepted are numbers >= 0")

    def __call__(self, t: int) -> float:
        """The rate of the update that ends with the ``t``-th microbatch, counted from 1."""
        warmup = self.warmup_epochs * self.microbatches_per_epoch
        return self.peak * min(1.0, t / warmup if warmup else 1.0) * self.factor(t - 1)

    @abstractmethod
    def factor(self, done: int) -> float:
        """From 1 down, after ``done`` microbatches."""

    def progress(self, done: int) -> float:
        """How far the run is from the end of the warm-up (0) to its own end (1)."""
        start, stop = self.warmup_epochs * self.microbatches_per_epoch, self.epochs * self.microbatches_per_epoch
        return min(1.0, max(0.0, (done - start) / (stop - start))) if stop > start else 0.0


@dataclass(frozen=True)
class MultiStep(Schedule):
    """A step down by ``gamma`` at each milestone: an epoch, counted from 0, before which it happens."""

    milestones: Sequence[int] = ()
    gamma: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        if list(self.milestones) != sorted(set(self.milestones)) or min(self.milestones, default=1) < 1:
            raise ConfigError(f"schedule.milestones: found {list(self.milestones)}, accepted are increasing epochs >= 1")
        if not 0 <= self.gamma <= 1:
            raise ConfigError(f"schedule.gamma: found {self.gamma}, accepted are numbers from 0 to 1")

    def factor(self, done: int) -> float:
        epoch = done // self.microbatches_per_epoch
        return float(self.gamma ** sum(epoch >= milestone for milestone in self.milestones))


@dataclass(frozen=True)
class Cosine(Schedule):
    """Half a period of the cosine, down to 0 (Loshchilov, Hutter 2017, Eq. 5, without restarts)."""

    def factor(self, done: int) -> float:
        return (1 + math.cos(math.pi * self.progress(done))) / 2


@dataclass(frozen=True)
class Polynomial(Schedule):
    """(1 − progress)^power; You et al. 2017, section 5, take 2 for LARS, and 1 is linear."""

    power: float = 2.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.power < math.inf:
            raise ConfigError(f"schedule.power: found {self.power}, accepted are numbers > 0")

    def factor(self, done: int) -> float:
        return float((1 - self.progress(done)) ** self.power)


SCHEDULES: dict[str, Callable[..., Schedule]] = {"multistep": MultiStep, "cosine": Cosine, "polynomial": Polynomial}
"""By name."""


def peak_rate(lr: float, batch_size: int, k: int) -> float:
    """The rate for updates of ``batch_size`` · k samples from the one for 256 (Goyal et al. 2017, section 2.1)."""
    return lr * batch_size * k / 256
