"""Epochs of training and evaluation for any pipeline."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

from torch import Tensor

from petra.data import EvalSource, TrainSource
from petra.distributed import all_gather_objects
from petra.engine.options.extension import Extension
from petra.engine.totals import Result
from petra.errors import DataError, Interrupted, first_line, invalid, is_integer, require
from petra.pipeline import Pipeline
from petra.training.checkpoint import Checkpoints
from petra.training.watchers import Watcher

Row = dict[str, Any]
"""Numbers of a finished epoch, as in metrics.jsonl. All but the times are the same in every process.

``epoch`` counts from 1, ``microbatches`` from the start of the run. ``train_<name>`` are means over the epoch, computed with the
weights of the time, ``test_<name>`` those of the evaluation after it: losses in nats per target, shares from 0 to 1.
``<unit>_per_second`` is the speed of training alone, ``seconds`` the duration with evaluation, ``learning_rate`` that at the end of
the epoch, and ``stage/<j>/<name>`` are metrics of stages (:meth:`petra.Pipeline.stage_metrics`). ``sample`` is a text, if one of
``Pipeline.measures`` returns it.
"""


def means(result: Result, unit: str, bytes_per_target: float | None = None) -> dict[str, float]:
    """Return loss and metrics by name: NaN if no target counts.

    For tokens, add the perplexity, the exponential of the loss. If the bytes of text per token are known, add the bits per byte,
    which are comparable between vocabularies.
    """
    if not result.targets:
        result = replace(result, loss=math.nan, metrics=dict.fromkeys(result.metrics, math.nan))
    text = {"perplexity": math.exp(min(result.loss, 700.0))} if unit == "tokens" else {}
    if bytes_per_target is not None:
        text["bits_per_byte"] = result.loss / math.log(2) / bytes_per_target
    return {"loss": result.loss, **result.metrics, **text}


class Trainer:
    """Trains a pipeline epoch by epoch, evaluates it after each epoch and saves checkpoints.

    All processes of the pipeline must make the same calls. Pass watchers only in the process of the first stage.

    Args:
        pipeline: This process's part of the pipeline. It must have a learning rate.
        train: Training data.
        test: Test data.
        limit: Largest number of microbatches in an epoch and in an evaluation, or None.
        checkpoints: Writer of checkpoints; None to write none. The trainer saves one after each epoch, and at planned drains.
        watchers: Observers of microbatches and epochs: records, loggers and progress.
        stop: Returns whether this process was asked to stop. Called after each drain; without planned drains also during training.

    Raises:
        ConfigError: If the pipeline has no learning rate, or the data are no training and test data.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        train: TrainSource,
        test: EvalSource,
        *,
        limit: int | None = None,
        checkpoints: Checkpoints | None = None,
        watchers: Sequence[Watcher] = (),
        stop: Callable[[], bool] = lambda: False,
    ) -> None:
        rate = pipeline.recipe.learning_rate
        if rate is None:
            raise invalid("learning_rate", "a function of the microbatches done, for a pipeline with a trainer", "None")
        require(limit is None or (is_integer(limit) and limit >= 1), "limit", "None or an integer >= 1", limit)
        for name, source, length in (("train", train, "batches_per_epoch"), ("test", test, "batches")):
            require(hasattr(source, length), name, f"a source with the attribute {length}", type(source).__name__)
        self.pipeline, self.train, self.test, self._learning_rate = pipeline, train, test, rate
        self.checkpoints, self.watchers, self.stop = checkpoints or Checkpoints(Path(), keep=0), watchers, stop
        self.microbatches, self.test_batches = limited(train.batches_per_epoch, limit), limited(test.batches, limit)

        self.history: list[Row] = []
        self._sums: list[float] = []  # of the epoch in progress
        self._seconds = 0.0
        self.state()  # refuses watchers whose states have the same names

    def fit(self, epochs: int) -> list[Row]:
        """Train until ``epochs`` epochs are done, and return all of them.

        Raises:
            ConfigError: If ``epochs`` is not an integer >= 0, or so many epochs have no update.
            Interrupted: In every process, if any was asked to stop. The last checkpoint is complete.
            PetraError: In every process, if a checkpoint cannot be written. The pipeline has drained.
        """
        require(is_integer(epochs) and epochs >= 0, "epochs", "an integer >= 0", epochs)
        if epochs > len(self.history):
            require_an_update(self.pipeline.plan.k, epochs * self.microbatches, self.pipeline.recipe.extensions)
        done, known = self.pipeline.microbatches_done, len(self.history) * self.microbatches
        expected = (
            f"{known} microbatches done, as in this trainer's history (for trained weights, load_state_dict() into a new one)"
        )
        fits = done == known or (self._sums and known < done <= known + self.microbatches)
        require(bool(fits), "pipeline", expected, done)
        while len(self.history) < epochs:
            try:
                self._run_epoch(len(self.history) + 1)
            except Exception as error:
                error.add_note(f"the pipeline was last drained after microbatch {self.pipeline.microbatches_done}")
                if isinstance(error, DataError):  # there may be no space even for the message
                    self.checkpoints.settle()
                raise
        self.checkpoints.wait()
        return [*self.history]

    def state(self) -> dict[str, Any]:
        """Return what :meth:`resume` needs, as values for JSON. A checkpoint's facts have it under ``trainer``."""
        state = {"history": [*self.history], "sums": self._sums, "seconds": self._seconds, "epoch": self.microbatches}
        state["clock"] = self.pipeline.microbatches_done
        for watcher in self.watchers:
            own = watcher.state()
            twice = ", ".join(sorted(state.keys() & own.keys()))
            require(not twice, "watchers", "states with names that nothing else has", twice)
            state |= own
        return state

    def resume(self, state: Mapping[str, Any]) -> None:
        """Resume from what :meth:`state` returned. Restore the pipeline first.

        Raises:
            DataError: If ``state`` is something else.
        """
        try:
            self.history, self._seconds = [dict(row) for row in state["history"]], float(state["seconds"])
            self._sums, epoch = [float(n) for n in state["sums"]], state["epoch"]
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"checkpoint: its facts hold no valid state of the trainer ({first_line(error)})") from error
        expected = f"data with {epoch} microbatches in an epoch"
        require(epoch == self.microbatches, "checkpoint", expected, self.microbatches, DataError)
        clock = self.pipeline.microbatches_done
        saved = state.get("clock", clock)
        require(saved == clock, "pipeline", f"the one that was restored at microbatch {saved}", clock, DataError)
        for watcher in self.watchers:
            watcher.resume(state, clock)

    def phase(self, name: str, *, admit: bool = False) -> AbstractContextManager[None]:
        """Return a context for work on a drained pipeline, or for training until it has drained. A subclass may check its result.

        Args:
            name: Name of the phase, used once for each number of microbatches.
            admit: Whether other processes may join the run at its end.
        """
        return nullcontext()

    def _run_epoch(self, epoch: int) -> None:
        """Train to the end of an epoch, which may have begun before a checkpoint, then evaluate and record it."""
        start, end = (epoch - 1) * self.microbatches, epoch * self.microbatches
        for watcher in self.watchers:
            watcher.epoch_begin(epoch, start, self.pipeline.microbatches_done - start)
        while self.pipeline.microbatches_done < end:
            self._train_to_drain(end)
            with self.phase("trained", admit=True):
                pass
            if self.pipeline.microbatches_done < end:
                with self.phase("saved"):
                    self._save_and_stop(None)
        with self.phase("evaluated"):
            row = self._evaluate(epoch)
            self.history.append(row)
            self._sums, self._seconds = [], 0.0
            for watcher in self.watchers:
                watcher.epoch_end(row)
            self._save_and_stop(score_of(row))

    def _train_to_drain(self, end: int) -> None:
        """Train up to the next planned drain or the end of the epoch; until a stop is requested or a checkpoint not written."""
        started, planned = time.perf_counter(), self.checkpoints.next_after(self.pipeline.microbatches_done)
        # An unplanned drain changes the weights of a run. With planned drains, a run that stops there resumes bit for bit.
        stop = (lambda: self.stop() or self.checkpoints.failed) if planned is None else None
        receivers = [watcher.microbatch for watcher in self.watchers if type(watcher).microbatch is not Watcher.microbatch]

        def on_microbatch(report: Tensor) -> None:
            for receive in receivers:
                receive(report)

        count = (end if planned is None else min(end, planned)) - self.pipeline.microbatches_done
        found = self.pipeline.train(self.train, count, on_microbatch if receivers else None, stop)
        self._sums = [a + b for a, b in zip_longest(self._sums, found.sums, fillvalue=0.0)]
        self._seconds += time.perf_counter() - started

    def _evaluate(self, epoch: int) -> Row:
        """Evaluate after an epoch, and return its numbers."""
        started, clock, unit = time.perf_counter(), self.pipeline.microbatches_done, self.test.unit
        test = self.pipeline.evaluate(self.test, self.test_batches)
        train = Result.of(self._sums, self.pipeline.recipe.metrics)
        return {
            "epoch": epoch,
            "microbatches": clock,
            **{f"train_{key}": value for key, value in means(train, unit).items()},
            **{f"test_{key}": value for key, value in means(test, unit, self.test.bytes_per_target).items()},
            f"{unit}_per_second": train.targets / self._seconds,
            "learning_rate": float(self._learning_rate(clock)),
            "seconds": self._seconds + time.perf_counter() - started,
            **self.pipeline.stage_metrics(),
        }

    def _save_and_stop(self, score: float | None) -> None:
        """Save the drained pipeline, and raise :class:`Interrupted` if any process was asked to stop."""
        self.checkpoints.save(self.pipeline, {"trainer": self.state()}, score)
        if any(all_gather_objects(self.stop(), call="Trainer.fit()")):
            self.checkpoints.wait()
            raise Interrupted(self.pipeline.microbatches_done, saved=self.checkpoints.keep > 0)


def score_of(row: Row) -> float:
    """Return the quality of the network after an epoch, by which the best checkpoint is kept: higher is better."""
    return float(row.get("test_miou", row.get("test_accuracy", -row["test_loss"])))


def require_an_update(k: int, microbatches: int, extensions: Iterable[Extension]) -> None:
    """Check that a run has at least one update, and those that its extensions need.

    Raises:
        ConfigError: If it has fewer microbatches than an update has, or an extension would not act.
    """
    require(k <= microbatches, "k", f"at most the {microbatches} microbatches of the run, which would have no update", k)
    for extension in extensions:
        extension.check_length(microbatches // k)


def limited(batches: int, limit: int | None) -> int:
    """Return ``batches``, at most ``limit`` if there is one."""
    return batches if limit is None else min(batches, limit)
