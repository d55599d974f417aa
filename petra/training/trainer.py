"""Epochs of training and evaluation over any pipeline."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from petra.data import EvalStream, TrainStream
from petra.distributed import gathered
from petra.engine.totals import Result
from petra.errors import DataError, Interrupted, first_line
from petra.pipeline import Pipeline
from petra.training.checkpoint import Checkpoints
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
    """Trains a pipeline epoch by epoch, evaluates it after each and writes checkpoints; every process makes the same calls.

    Args:
        learning_rate: the pipeline's own, for the records.
        loggers, progress: only in the process that keeps the records, which has to be that of the first stage.
        limit: microbatches of an epoch, and of an evaluation, at most.
        unit: what a target belongs to: images or tokens.
        checkpoints: written after each epoch; None for none.
        every: microbatches between two drains of the pipeline, counted from the start of the run, with a checkpoint at each; None
            for a drain at the end of epochs only.
        facts: of the run, for its checkpoints.
        stop: whether this process has been told to stop; asked at each drain and, without ``every``, all the time.
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
        checkpoints: Checkpoints | None = None,
        every: int | None = None,
        facts: Mapping[str, Any] | None = None,
        stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self.pipeline, self.learning_rate = pipeline, learning_rate
        self.train, self.test, self.unit = train, test, unit
        self.checkpoints, self.every, self.facts, self.stop = checkpoints, every, dict(facts or {}), stop
        self.loggers, self.progress = loggers, progress
        self.microbatches, self.test_batches = limited(train.batches_per_epoch, limit), limited(test.batches, limit)

        self.history: list[Epoch] = []
        self._parts: list[Result] = []  # of the epoch under way, one from each drain to the next
        self._seconds = 0.0

    def fit(self, epochs: int) -> list[Epoch]:
        """Trains until there are ``epochs`` epochs and returns the numbers of each.

        Raises:
            Interrupted: somebody asked for it, in every process; the last checkpoint is complete.
            PetraError: a checkpoint can't be written, in every process.
        """
        while len(self.history) < epochs:
            try:
                self._epoch(len(self.history) + 1)
            except Exception as error:
                error.add_note(f"last drain after microbatch {self.pipeline.clock}")
                raise
        if self.checkpoints is not None:
            self.checkpoints.wait()
        return self.history

    def resume(self, state: Mapping[str, Any]) -> None:
        """Goes on from the ``trainer`` of a checkpoint's facts, after the pipeline has.

        Raises:
            DataError: it is something else.
        """
        try:
            self.history = [
                Epoch(**{**epoch, "train": Result(**epoch["train"]), "test": Result(**epoch["test"])}) for epoch in state["history"]
            ]
            self._parts, self._seconds = [Result(**part) for part in state["parts"]], float(state["seconds"])
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"checkpoint: its facts don't tell how far the run was ({first_line(error)})") from error

    def _epoch(self, epoch: int) -> None:
        done = self.pipeline.clock - (epoch - 1) * self.microbatches
        if self.progress is not None:
            self.progress.start(epoch, self.pipeline.clock - done, done)
        on_microbatch = None if self.progress is None else self.progress.microbatch
        while done < self.microbatches:
            started = time.perf_counter()
            until = self.microbatches - done if self.every is None else self.every - self.pipeline.clock % self.every
            count = min(until, self.microbatches - done)
            stop = self.stop if self.every is None else None  # planned drains are where runs are the same bit for bit
            self._parts.append(self.pipeline.train(self.train, count, on_microbatch, stop))
            self._seconds += time.perf_counter() - started
            done = self.pipeline.clock - (epoch - 1) * self.microbatches
            if done < self.microbatches:
                self._drained(None)
        started = time.perf_counter()
        tested = self.pipeline.evaluate(self.test, self.test_batches)
        finished = Epoch(
            epoch=epoch,
            microbatches=self.pipeline.clock,
            train=mean(self._parts),
            test=tested,
            seconds=self._seconds + time.perf_counter() - started,
            training_seconds=self._seconds,
            learning_rate=self.learning_rate(self.pipeline.clock),
            stages=self.pipeline.stage_metrics(),
            unit=self.unit,
        )
        self.history.append(finished)
        self._parts, self._seconds = [], 0.0
        for logger in self.loggers:
            logger.log(finished.row())
        if self.progress is not None:
            self.progress.end(finished.row())
        self._drained(tested.metrics.get("accuracy", -tested.loss))

    def _drained(self, score: float | None) -> None:
        """Nothing is in flight: the moment for a checkpoint, and to stop."""
        if self.checkpoints is not None:
            history = [asdict(epoch) for epoch in self.history]
            state = {"history": history, "parts": [asdict(part) for part in self._parts], "seconds": self._seconds}
            self.checkpoints.save(self.pipeline, {**self.facts, "trainer": state}, score)
        if any(gathered(self.stop())):
            if self.checkpoints is not None:
                self.checkpoints.wait()
            raise Interrupted(self.pipeline.clock, saved=self.checkpoints is not None)


def mean(parts: Sequence[Result]) -> Result:
    """The means over all targets of several runs of the pipeline."""
    if len(parts) == 1:
        return parts[0]
    targets = sum(part.targets for part in parts)

    def over(values: Sequence[float]) -> float:
        return sum(value * part.targets for value, part in zip(values, parts, strict=True)) / max(targets, 1)

    metrics = {name: over([part.metrics[name] for part in parts]) for name in parts[0].metrics}
    return Result(targets, over([part.loss for part in parts]), metrics)


def limited(batches: int, limit: int | None) -> int:
    """``batches``, or fewer for trying things out."""
    return batches if limit is None else min(batches, limit)
