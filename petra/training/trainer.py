"""Epochs of training and evaluation over any pipeline."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from petra.data import EvalStream, TrainStream
from petra.pipeline import Pipeline
from petra.training.progress import Progress
from petra.training.records import Logger


@dataclass(frozen=True)
class Epoch:
    """The numbers of one epoch: losses in nats per image, accuracies 0 … 1, the same in every process but for the times."""

    epoch: int
    """Counted from 1."""
    microbatches: int
    """Trained on since the start of the run."""
    train_loss: float
    """Mean over the epoch, under the weights of the time."""
    train_accuracy: float
    test_loss: float
    test_accuracy: float
    images_per_second: float
    """Training only."""
    learning_rate: float
    """At the end of the epoch."""
    seconds: float
    """Training and evaluation."""


class Trainer:
    """Trains a pipeline epoch by epoch and evaluates it after each one; every process of the pipeline makes the same calls.

    Args:
        learning_rate: the pipeline's own, for the records.
        loggers, progress: only in the process that keeps the records, which has to be that of the first stage.
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
    ) -> None:
        self.pipeline, self.learning_rate = pipeline, learning_rate
        self.train, self.test = train, test
        self.loggers, self.progress = loggers, progress

    def fit(self, epochs: int) -> list[Epoch]:
        """Trains for ``epochs`` epochs and returns the numbers of each."""
        history = []
        for epoch in range(1, epochs + 1):
            row = self._epoch(epoch)
            history.append(row)
            stages = self.pipeline.stage_metrics()
            for logger in self.loggers:
                logger.log(asdict(row) | stages)
            if self.progress is not None:
                self.progress.end(asdict(row))
        return history

    def _epoch(self, epoch: int) -> Epoch:
        started = time.perf_counter()
        if self.progress is not None:
            self.progress.start(epoch, self.pipeline.clock)
        on_microbatch = None if self.progress is None else self.progress.microbatch
        trained = self.pipeline.train(self.train, self.train.batches_per_epoch, on_microbatch)
        between = time.perf_counter()
        tested = self.pipeline.evaluate(self.test, self.test.batches)
        return Epoch(
            epoch=epoch,
            microbatches=self.pipeline.clock,
            train_loss=trained.loss,
            train_accuracy=trained.metrics["accuracy"],
            test_loss=tested.loss,
            test_accuracy=tested.metrics["accuracy"],
            images_per_second=trained.targets / (between - started),
            learning_rate=self.learning_rate(self.pipeline.clock),
            seconds=time.perf_counter() - started,
        )
