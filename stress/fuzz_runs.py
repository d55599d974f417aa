"""Random sequences of commands on the folder of one run, for :mod:`stress.fuzz_configs`, which describes them."""

from __future__ import annotations

import json
import random
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from launch import evaluate, train
from launch.run.weights import read_weights
from launch.runtime.signals import StopRequest
from petra.training import Trainer

EPOCH, EVERY = 4, 2
"""Microbatches in an epoch, and between two checkpoints of a run that is asked to stop."""
DONE, FAILED, STOPPED = 0, 2, 75
"""Exit status of a command that has done what it was asked for, that refuses it, and that stopped on request."""
LINE = (
    *("data=tokens", "data.root=corpus", "data.classes=8", "data.size=4", "data.batch_size=2", "model=revgpt", "model.dim=8"),
    *(
        "model.heads=2",
        "model.depth=1",
        "k=2",
        f"trainer.limit_batches={EPOCH}",
        "trainer.device=cpu",
        "schedule.warmup_epochs=0.5",
    ),
    *("run_dir=run", "resume=auto", "resume_change=[optim.ema]"),
)
COUNTS = {part: {"documents": 1, "tokens": tokens, "bytes": 2 * tokens} for part, tokens in (("train", 64), ("val", 64))}
DAMAGES: tuple[tuple[str, str, Any], ...] = (
    ("train", "tokens", 10**9),
    ("val", "tokens", 63),
    ("val", "tokens", 0),
    ("val", "bytes", float("nan")),
    ("val", "bytes", -5),
    ("val", "bytes", 0),
)


class Train(NamedTuple):
    """Train to the end of an epoch, or to the next checkpoint."""

    epochs: int
    export: str
    average: str
    stopped: bool


Step = Train | tuple[str, str, Any] | str
"""A training; a damage of corpus.json: part, key and value; or the name of something else that happens to the folder."""


def sequence(chance: random.Random) -> list[Step]:
    """Return 4 to 6 steps. The first trains."""
    steps: list[Step] = [_training(chance)]
    for _ in range(chance.randrange(3, 6)):
        kind = chance.random()
        steps.append(
            _training(chance) if kind < 0.7 else chance.choice(DAMAGES) if kind < 0.85 else chance.choice(("no config", "no run"))
        )
    return steps


def _training(chance: random.Random) -> Train:
    export = chance.choice(("none", "pt", "safetensors"))
    return Train(chance.randint(1, 3), export, chance.choice(("null", "0.5")), chance.random() < 0.25)


class Runner:
    """Executes the steps of a sequence in the working directory, and checks each.

    Attributes:
        clock: Microbatches that the run has trained on, 0 without a run.
        weights: Weights of the network after them.
    """

    def __init__(self) -> None:
        self.clock, self.weights = 0, dict[str, Tensor]()
        Path("corpus").mkdir()
        for part in COUNTS:
            header = np.zeros(256, "<i4")
            header[:3] = 20240520, 1, COUNTS[part]["tokens"]
            tokens = np.random.default_rng(0).integers(8, size=COUNTS[part]["tokens"])
            Path(f"corpus/{part}_0.bin").write_bytes(header.tobytes() + tokens.astype("<u2").tobytes())
        self._write_corpus()

    def step(self, step: Step) -> None:
        """Execute a step.

        Raises:
            AssertionError: If a command does not do what it should, or leaves another state.
        """
        if isinstance(step, Train):
            self._train(step)
            self._evaluate()
        elif step == "no config":
            Path("run/config.yaml").unlink(missing_ok=True)
        elif step == "no run":
            shutil.rmtree("run", ignore_errors=True)
            self.clock = 0
        else:
            part, key, value = step
            self._write_corpus({**COUNTS, part: {**COUNTS[part], key: value}})
            status, _, error = command(lambda: _train(Train(9, "none", "null", False)))
            assert status == FAILED, f"training with {part}.{key}={value} in corpus.json ended with status {status}"
            assert "corpus" in error, error
            self._write_corpus()

    def _train(self, step: Train) -> None:
        due = step.epochs * EPOCH
        with recorded() as found:
            status, _, error = command(lambda: _train(step))
        if due < self.clock:
            assert status == FAILED, f"{step} after microbatch {self.clock} ended with status {status}"
            assert error.startswith("error: trainer.epochs: expected"), error
            return
        stops = step.stopped and self.clock < due
        assert status == (STOPPED if stops else DONE), f"{step}: status {status}, {error}"
        self.weights = found["weights"]
        self.clock = self.clock + EVERY if stops else due
        assert found["clock"] == self.clock, f"{step}: microbatch {found['clock']}, expected {self.clock}"

    def _evaluate(self) -> None:
        """Check that ``petra evaluate`` reads the weights of the last microbatch, or names what it misses."""
        status, out, error = command(lambda: evaluate.main(["run=run"]))
        if not Path("run/config.yaml").exists():  # the training was refused
            assert status == FAILED, f"evaluation without config.yaml ended with status {status}"
            assert "config.yaml" in error, error
            return
        assert status == DONE, error
        path = json.loads(out)["weights"]
        assert f"weights of {path}, after microbatch {self.clock} (" in error, error
        state = read_weights(Path(path))
        assert state.keys() == self.weights.keys()
        assert all(torch.equal(state[key], value) for key, value in self.weights.items()), f"{path}: older weights"

    def _write_corpus(self, facts: Any = COUNTS) -> None:
        Path("corpus/corpus.json").write_text(json.dumps({"classes": 8, **facts}))


def command(main: Callable[[], None]) -> tuple[int, str, str]:
    """Return the exit status of a command, what it printed, and the last line that it printed to stderr.

    Raises:
        AssertionError: If a refusal is not one line.
    """
    out, err = StringIO(), StringIO()
    status = DONE
    with redirect_stdout(out), redirect_stderr(err):
        try:
            main()
        except SystemExit as ended:
            status = ended.code if isinstance(ended.code, int) else DONE
    lines = err.getvalue().splitlines()
    assert status != FAILED or [line.startswith("error: ") for line in lines].count(True) == 1, err.getvalue()
    return status, out.getvalue(), lines[-1] if lines else ""


def _train(step: Train) -> None:
    words = [*LINE, f"trainer.epochs={step.epochs}", f"trainer.export={step.export}", f"optim.ema={step.average}"]
    words += [f"checkpoint.every={EVERY}"] if step.stopped else []
    with (
        mock.patch.object(sys, "argv", ["petra train", *words]),
        mock.patch.object(torch, "set_num_interop_threads"),  # torch accepts one call per process
        mock.patch("launch.run.training.StopRequest", Stopped) if step.stopped else nullcontext(),
    ):
        train.main()


class Stopped(StopRequest):
    """A request to stop that is there from the start, without signals."""

    def __call__(self) -> bool:
        return True

    def handle_signals(self) -> nullcontext[None]:  # type: ignore[override]
        return nullcontext()


@contextmanager
def recorded() -> Iterator[dict[str, Any]]:
    """Record clock and weights of the pipelines that are trained inside the ``with`` block."""
    found: dict[str, Any] = {}
    fit = Trainer.fit

    def recording(self: Trainer, epochs: int) -> Any:
        try:
            return fit(self, epochs)
        finally:
            found["clock"] = self.pipeline.clock
            found["weights"] = {key: value.clone() for key, value in self.pipeline.state_dict().items()}

    with mock.patch.object(Trainer, "fit", recording):
        yield found
