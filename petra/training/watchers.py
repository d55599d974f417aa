"""Observers of a trainer: the base of loggers, and the one that computes means over a fixed number of updates."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from math import nan
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from petra.engine.recipe import Recipe
from petra.engine.totals import Result
from petra.errors import require

NO_SUMMARY: Mapping[str, Any] = {}


class Watcher:
    """Observer of a :class:`petra.training.Trainer`. Override the events that you need; they do nothing by default."""

    def epoch_begin(self, epoch: int, start: int, done: int) -> None:
        """Receive the beginning of an epoch, from 1, or of the rest of one.

        Args:
            epoch: Number of the epoch, from 1.
            start: Microbatches of the run before the epoch.
            done: Microbatches of the epoch that are already done.
        """

    def microbatch(self, report: Tensor) -> None:
        """Receive a microbatch's report of shape (2 + metrics,) (:meth:`petra.Pipeline.train`). Reading it waits for the device."""

    def epoch_end(self, row: Mapping[str, float]) -> None:
        """Receive the numbers of a finished epoch (:data:`petra.training.Row`)."""

    def state(self) -> dict[str, Any]:
        """Return what :meth:`resume` needs, as values for JSON, under names of this watcher alone."""
        return {}

    def resume(self, state: Mapping[str, Any], clock: int) -> None:
        """Continue after ``clock`` microbatches, from the states of all watchers at that time."""


class Logger(Watcher, ABC):
    """Receiver of rows of numbers. Each row has the entry ``microbatches``, the number of microbatches trained on so far."""

    @abstractmethod
    def log(self, row: Mapping[str, float]) -> None:
        """Receive the numbers of an epoch, or of some updates (``update/<name>``)."""

    def epoch_end(self, row: Mapping[str, float]) -> None:
        self.log(row)

    def close(self, summary: Mapping[str, Any] = NO_SUMMARY, pictures: Sequence[Path] = ()) -> None:
        """Receive the final numbers and the pictures (PNG files) of a run that is complete."""


class Means:
    """Sums of reports, and the means over their targets.

    Args:
        recipe: Training settings of the pipeline. The metrics follow the number of targets and the loss in a report.
    """

    def __init__(self, recipe: Recipe) -> None:
        self._metrics = recipe.metrics
        self._sum: Tensor | Sequence[float] = ()

    def add(self, report: Tensor) -> None:
        """Add the report of a microbatch."""
        if not isinstance(self._sum, Tensor):
            self._sum = report.new_tensor(self._sum) if self._sum else torch.zeros_like(report)
        self._sum += report

    @property
    def totals(self) -> list[float]:
        """Number of targets, sum of the losses, sums of the metrics. Reading them synchronizes with the device."""
        return self._sum.tolist() if isinstance(self._sum, Tensor) else list(self._sum)

    def reset(self, totals: Sequence[float] = ()) -> None:
        """Begin again from ``totals``."""
        self._sum = totals

    def values(self) -> tuple[float, dict[str, float]]:
        """Return the number of targets, and loss and metrics by name: NaN if no target counts."""
        found = Result.of(self.totals, self._metrics)
        values = {"loss": found.loss, **found.metrics}
        return found.targets, values if found.targets else dict.fromkeys(values, nan)


class UpdateMeans(Watcher):
    """Logs the means of every ``every`` updates.

    A row has the entries ``microbatches``, ``updates``, ``update/loss``, ``update/<metric>`` and ``update/learning_rate``.

    Args:
        every: Number of updates between two rows.
        k: Number of microbatches per update.
        recipe: Training settings of the pipeline.
        loggers: Receivers of the rows.

    Raises:
        ConfigError: If ``every`` < 1.
    """

    def __init__(self, every: int, k: int, recipe: Recipe, loggers: Sequence[Logger]) -> None:
        require(every >= 1, "trainer.log_every", "null or an integer >= 1", every)
        assert recipe.learning_rate is not None
        self._microbatches, self._k, self._learning_rate = every * k, k, recipe.learning_rate
        self._means, self._loggers = Means(recipe), loggers
        self._clock, self._key = 0, f"updates, every {every * k} microbatches"

    def microbatch(self, report: Tensor) -> None:
        self._means.add(report)
        self._clock += 1
        if self._clock % self._microbatches:
            return
        _, means = self._means.values()
        self._means.reset()
        row = {
            "microbatches": self._clock,
            "updates": self._clock // self._k,
            **{f"update/{name}": value for name, value in means.items()},
            "update/learning_rate": float(self._learning_rate(self._clock)),
        }
        for logger in self._loggers:
            logger.log(row)

    def state(self) -> dict[str, Any]:
        return {self._key: self._means.totals}

    def resume(self, state: Mapping[str, Any], clock: int) -> None:
        self._clock = clock
        for logger in self._loggers:
            logger.resume(state, clock)
        # None if another number of updates had one row; older checkpoints don't tell that number.
        self._means.reset(state.get(self._key, state.get("updates", ())))
