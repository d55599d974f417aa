"""The learning rate as a function of the microbatches that a stage has done, so that it means the same on every stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from petra.errors import ConfigError


@dataclass(frozen=True)
class Schedule:
    """Linear warm-up, then a step down by ``gamma`` at each milestone (Goyal et al. 2017, sections 2.2 and 5.1).

    Attributes:
        peak: learning rate after the warm-up.
        microbatches_per_epoch: length of an epoch.
        warmup_epochs: length of the warm-up in epochs; 0 for none.
        milestones: epochs, counted from 0, before which the rate steps down.

    Raises:
        ConfigError: a value out of range.
    """

    peak: float
    microbatches_per_epoch: int
    warmup_epochs: float = 0
    milestones: Sequence[int] = ()
    gamma: float = 0.1

    def __post_init__(self) -> None:
        if not self.peak >= 0:
            raise ConfigError(f"optim.lr: found {self.peak}, accepted are numbers >= 0")
        if not self.warmup_epochs >= 0:
            raise ConfigError(f"optim.warmup_epochs: found {self.warmup_epochs}, accepted are numbers >= 0")
        if list(self.milestones) != sorted(set(self.milestones)) or min(self.milestones, default=1) < 1:
            raise ConfigError(f"optim.milestones: found {list(self.milestones)}, accepted are increasing epochs >= 1")
        if not 0 <= self.gamma <= 1:
            raise ConfigError(f"optim.gamma: found {self.gamma}, accepted are numbers from 0 to 1")

    def __call__(self, t: int) -> float:
        """The rate of the update that ends with the ``t``-th microbatch, counted from 1."""
        warmup = self.warmup_epochs * self.microbatches_per_epoch
        epoch = (t - 1) // self.microbatches_per_epoch
        steps = sum(epoch >= milestone for milestone in self.milestones)
        return self.peak * min(1.0, t / warmup if warmup else 1.0) * self.gamma**steps


def peak_rate(lr: float, batch_size: int, k: int) -> float:
    """The rate for updates of ``batch_size`` · k samples from the one for 256 (Goyal et al. 2017, section 2.1)."""
    return lr * batch_size * k / 256
