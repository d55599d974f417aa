"""Epochs of training and evaluation over any pipeline."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from petra.data import EvalStream, TrainStream
from petra.pipeline import Pipeline, Result
from petra.training.progress import Progress
from petra.training.records import Logger


@dataclass(frozen=True)
class Epoch:
    """What one epoch gave: the same in every process but for the times."""

    epoch: int
    """Counted from 1."""
    microbatches: int
    """Trained on since the start of the run."""
    train: Result
    """Means over the epoch, under the weights of the time."""
    test: Result
    seconds: float
    """Training and evaluation."""
    training_seconds: float
    learning_rate: float
    """At the end of the epoch."""
    stages: Mapping[str, float]
    """``stage/<j>/<name>``: see :meth:`petra.Pipeline.stage_metrics`."""
    unit: str
    """What a target belongs to: images or tokens."""

    def row(self) -> dict[str, float]:
        """All numbers by the names they have in metrics.jsonl: losses in nats per target, shares 0 … 1."""
        return {
            "epoch": self.epoch,
            "microbatches": self.microbatches,
            **{f"train_{key}": value for key, value in means(self.train, self.unit).items()},
            **{f"test_{key}": value for key, value in means(self.test, self.unit).items()},
            f"{self.unit}_per_second": self.train.targets / self.training_seconds,
            "learning_rate": self.learning_rate,
            "seconds": self.seconds,
            **self.stages,
        }


def means(result: Result, unit: str) -> dict[str, float]:
    """Loss and metrics of a run of the pipeline; of text also the perplexity, e to the loss."""
    text = {"perplexity": math.exp(min(result.loss, 700.0))} if unit == "tokens" else {}
    return {"loss": result.loss, **result.metrics, **text}


class Trainer:
    """Trains a pipeline epoch by epoch and evaluates it after each one; every process of the pipeline makes the same calls.

    Args:
        learning_rate: the pipeline's own, for the records.
        loggers, progress: only in the process that keeps the records, which has to be that of the first stage.
        limit: microbatches of an epoch, and of an evaluation, at most.
        unit: what a target belongs to: images or tokens.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        train: TrainStream,
        test: EvalStream,
        learning_rate: Callable[[int], float],
        *,
        loggers: Sequence[Logger] = (),
        progress: Progress | None = None,
        limit: int | None = None,
        unit: str = "images",
    ) -> None:
        self.pipeline, self.learning_rate = pipeline, learning_rate
        self.train, self.test, self.unit = train, test, unit
        self.loggers, self.progress = loggers, progress
        self.microbatches, self.test_batches = limited(train.batches_per_epoch, limit), limited(test.batches, limit)

    def fit(self, epochs: int) -> list[Epoch]:
        """Trains for ``epochs`` epochs and returns the numbers of each."""
        history = []
        for epoch in range(1, epochs + 1):
            done = self._epoch(epoch)
            history.append(done)
            for logger in self.loggers:
                logger.log(done.row())
            if self.progress is not None:
                self.progress.end(done.row())
        return history

    def _epoch(self, epoch: int) -> Epoch:
        started = time.perf_counter()
        if self.progress is not None:
            self.progress.start(epoch, self.pipeline.clock)
        on_microbatch = None if self.progress is None else self.progress.microbatch
        trained = self.pipeline.train(self.train, self.microbatches, on_microbatch)
        between = time.perf_counter()
        tested = self.pipeline.evaluate(self.test, self.test_batches)
        return Epoch(
            epoch=epoch,
            microbatches=self.pipeline.clock,
            train=trained,
            test=tested,
            seconds=time.perf_counter() - started,
            training_seconds=between - started,
            learning_rate=self.learning_rate(self.pipeline.clock),
            stages=self.pipeline.stage_metrics(),
            unit=self.unit,
        )


def limited(batches: int, limit: int | None) -> int:
    """``batches``, or fewer for trying things out."""
    return batches if limit is None else min(batches, limit)
