"""Progress of a run: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping

from torch import Tensor
from tqdm import tqdm

from petra.engine.metrics import Metric, values_of
from petra.training.updates import ACCURACY


class Progress(ABC):
    """Adds up the reports of the current epoch (:class:`petra.engine.endpoints.Objective`) and shows their means periodically.

    Args:
        epochs: Number of epochs in the run.
        microbatches: Number of microbatches in an epoch.
        learning_rate: Learning rate as a function of microbatches.
        metrics: Metrics by name. In a report they follow the number of targets and the loss.
        unit: What a target belongs to: ``images``, ``tokens`` or ``pixels``.
    """

    seconds: float
    """Seconds between two updates of the display. Reading a report synchronizes with the device, so not every report is read."""

    def __init__(
        self,
        epochs: int,
        microbatches: int,
        learning_rate: Callable[[int], float],
        metrics: Mapping[str, Metric] = ACCURACY,
        unit: str = "images",
    ) -> None:
        self.epochs, self.microbatches, self.learning_rate = epochs, microbatches, learning_rate
        self.metrics, self.unit = metrics, unit
        self.epoch = self.done = 0

    def start(self, epoch: int, clock: int, done: int = 0) -> None:
        """Begin an epoch that starts after ``clock`` microbatches of the run, with ``done`` microbatches already done."""
        self.epoch, self.done, self._clock = epoch, done, clock
        self._totals: Tensor | None = None
        self._started = time.perf_counter()
        self._next = self._started + self.seconds

    def microbatch(self, report: Tensor) -> None:
        """Add the report of a microbatch that has completed."""
        self.done += 1
        self._totals = report.clone() if self._totals is None else self._totals.add_(report)
        now = time.perf_counter()
        if now >= self._next:
            self._next = now + self.seconds
            targets, loss, *sums = self._totals.tolist()
            speed, rate = targets / (now - self._started), self.learning_rate(self._clock + self.done)
            means = means_text({"loss": loss / max(targets, 1), **values_of(self.metrics, targets, sums)})
            self.show(f"{means}, {speed:.0f} {self.unit}/s, learning rate {rate:.4g}")

    @abstractmethod
    def show(self, means: str) -> None:
        """Show the means over the current epoch so far."""

    def end(self, row: Mapping[str, float]) -> None:
        """Show the numbers of a finished epoch."""
        self._print(
            f"epoch {row['epoch']}/{self.epochs}: {means_text(part(row, 'train_'))}; test {means_text(part(row, 'test_'))}; "
            f"{row[f'{self.unit}_per_second']:.0f} {self.unit}/s, learning rate {row['learning_rate']:.4g}, {row['seconds']:.1f} s"
        )

    def _print(self, text: str) -> None:
        print(text, flush=True)


def part(row: Mapping[str, float], prefix: str) -> dict[str, float]:
    """Return the numbers whose names begin with ``prefix``, under names without it."""
    return {key.removeprefix(prefix): value for key, value in row.items() if key.startswith(prefix)}


def means_text(means: Mapping[str, float]) -> str:
    """Format losses, perplexities and bits per byte as numbers, and all other metrics, which are shares, in per cent."""
    form = {"loss": ".4f", "perplexity": ".3f", "bits_per_byte": ".4f"}
    return ", ".join(f"{key} {value:{form.get(key, '.2%')}}" for key, value in means.items())


class Lines(Progress):
    """One line per epoch, and in long epochs a line every 30 seconds."""

    seconds = 30.0

    def show(self, means: str) -> None:
        self._print(f"epoch {self.epoch}/{self.epochs}, {self.done}/{self.microbatches}: {means}")


class Bar(Progress):
    """A bar for the current epoch, below one line per finished epoch."""

    seconds = 0.5

    def start(self, epoch: int, clock: int, done: int = 0) -> None:
        super().start(epoch, clock, done)
        self._bar = tqdm(
            total=self.microbatches,
            desc=f"epoch {epoch}/{self.epochs}",
            leave=False,
            dynamic_ncols=True,
            file=sys.stdout,
            bar_format="{desc} {bar} {n_fmt}/{total_fmt}{postfix}",
        )

    def show(self, means: str) -> None:
        self._bar.n = self.done
        self._bar.set_postfix_str(means)

    def end(self, row: Mapping[str, float]) -> None:
        self._bar.close()
        super().end(row)
