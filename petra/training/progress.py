"""Progress of a run: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from datetime import timedelta

from torch import Tensor
from tqdm import tqdm

from petra.engine.recipe import Recipe
from petra.training.watchers import Means, Watcher


class Lines(Watcher):
    """One line per epoch, and in long epochs a line every 30 seconds with the means over the current epoch so far, or a bar.

    These also have the time that is left until the end of the run, at the speed of the epoch so far, without evaluations.

    Args:
        epochs: Number of epochs in the run.
        microbatches: Number of microbatches in an epoch.
        recipe: Training settings of the pipeline.
        unit: What a target is counted as: ``images``, ``tokens`` or ``pixels``.
        trained: How the training loss is another function than the one of the evaluation, or nothing.
        evaluated: What the network is evaluated on after an epoch.
        bar: Show the current epoch as a bar, on a terminal.

    Attributes:
        seconds: Time between two updates of the display. Reading a report synchronizes with the device, so not all are read.
    """

    def __init__(
        self,
        epochs: int,
        microbatches: int,
        recipe: Recipe,
        unit: str = "images",
        *,
        trained: str = "",
        evaluated: str = "test",
        bar: bool = False,
    ) -> None:
        self._prefix, self._evaluated = f"{trained} " if trained else "", evaluated
        self.epochs, self.microbatches, self.unit, self.bar, self.seconds = epochs, microbatches, unit, bar, 0.5 if bar else 30.0
        self._bar: tqdm[None] | None = None
        self._means, self._learning_rate = Means(recipe), recipe.learning_rate or (lambda t: 0.0)

    def epoch_begin(self, epoch: int, start: int, done: int) -> None:
        self.epoch, self.done, self._start, self._first = epoch, done, start, done
        self._means.reset()
        self._started = time.perf_counter()
        self._next = self._started + self.seconds
        if self.bar:
            self._bar = tqdm(
                total=self.microbatches,
                desc=f"epoch {epoch}/{self.epochs}",
                leave=False,
                file=sys.stdout,
                bar_format="{desc} {bar} {n_fmt}/{total_fmt}{postfix}",
            )

    def microbatch(self, report: Tensor) -> None:
        self.done += 1
        self._means.add(report)
        now = time.perf_counter()
        if now >= self._next:
            self._next = now + self.seconds
            targets, means = self._means.values()
            speed, rate = targets / (now - self._started), self._learning_rate(self._start + self.done)
            left = (self.epochs - self.epoch + 1) * self.microbatches - self.done
            seconds = round(left * (now - self._started) / (self.done - self._first))
            until = f"{timedelta(seconds=seconds)} left"
            text = f"{self._prefix}{means_text(means)}, {speed:.0f} {self.unit}/s, learning rate {rate:.4g}, {until}"
            if self._bar is not None:
                self._bar.n = self.done
                self._bar.set_postfix_str(text)
            else:
                print(f"epoch {self.epoch}/{self.epochs}, {self.done}/{self.microbatches}: {text}", flush=True)

    def epoch_end(self, row: Mapping[str, float]) -> None:
        if self._bar is not None:
            self._bar.close()
        train, test = (
            means_text({key.removeprefix(part): value for key, value in row.items() if key.startswith(part)})
            for part in ("train_", "test_")
        )
        speed = f"{row[f'{self.unit}_per_second']:.0f} {self.unit}/s, learning rate {row['learning_rate']:.4g}"
        results = f"{self._prefix}{train}; {self._evaluated} {test}"
        print(f"epoch {row['epoch']}/{self.epochs}: {results}; {speed}, {row['seconds']:.1f} s", flush=True)
        if "sample" in row:
            print(f"  sample: {row['sample']!r}", flush=True)


def means_text(means: Mapping[str, float]) -> str:
    """Format loss and metrics as ``name value, name value``."""
    return ", ".join(f"{name} {value_text(name, value)}" for name, value in means.items())


def value_text(name: str, value: float) -> str:
    """Format losses, perplexities and bits per byte as numbers, and all other metrics, which are shares, in per cent."""
    form = {"loss": ".4f", "perplexity": ".3f", "bits_per_byte": ".4f"}
    return f"{value:{form.get(name, '.2%')}}"
