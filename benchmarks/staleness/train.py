"""One run of a cell: a training of fixed length, its losses on the validation and the test part, and its record."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.records import recorded
from benchmarks.report import machine
from benchmarks.staleness.cells import CLIP, VOCABULARY, WINDOW, WINDOWS, Cell
from petra import Hook, Pipeline, Recipe, TensorSpec, UpdateRules
from petra.data import Split, TrainSource, load_dataset
from petra.diagnostics.reconstruction_error import ReconstructionMonitor
from petra.diagnostics.weight_drift import WeightDrift, distance
from petra.errors import NumericsError
from petra.training import Cosine

UPDATES = 256
"""Updates of each run: 524,288 tokens. Shorter runs of a search would favour larger rates than the final runs need."""
SHORT, LONG = 0.1, 0.3
"""Warm-ups, as fractions of a run."""
SEARCH_SEED = 100
"""Seed of a search, which the final runs do not use."""
VALIDATION_WINDOWS, TEST_WINDOWS = 1024, 2048
"""Windows of each part that are evaluated, at equal distances over the whole part."""


@dataclass(frozen=True)
class Trial:
    """A cell with the settings of one run.

    Attributes:
        rate: Peak learning rate.
        warmup: Fraction of the run over which the rate rises.
        updates: Length of the run.
        seed: Seed of the weights and the data.
        final: Whether to evaluate the test part too.
    """

    cell: Cell
    rate: float
    warmup: float
    updates: int
    seed: int
    final: bool = False

    @property
    def name(self) -> str:
        """The name, which determines the trial."""
        return f"{self.cell.name}__lr{self.rate:g}_w{self.warmup:g}_u{self.updates}_s{self.seed}"


class ErrorHistory(ReconstructionMonitor):
    """Record the relative errors of reconstructed inputs over a run.

    Attributes:
        history: Errors of each stage (from 0), in the order of the measurements.
    """

    def __init__(self, pipeline: Pipeline) -> None:
        super().__init__(pipeline, limit=math.inf)
        self.history: dict[int, list[float]] = {}

    def collect(self) -> None:
        """Move the errors measured since the last call to the history."""
        for stage, error in self.errors.items():
            self.history.setdefault(stage, []).append(error)
        self.errors.clear()


def run(trial: Trial, data: Path, out: Path) -> dict[str, Any]:
    """Return the record of a trial, trained now unless ``out`` has it."""
    return recorded(out, trial.name, lambda: train(trial, data))


def train_cell(cell: Cell, rate: float, warmup: float, seed: int, data: Path, out: Path) -> dict[str, Any]:
    """Return the record of a run of the usual length, and print it. Without the seed of the search, the run is final."""
    record = run(Trial(cell, rate, warmup, UPDATES, seed, final=seed != SEARCH_SEED), data, out)
    print(f"{cell.name}: rate {rate:g}, warm-up {warmup:g}, seed {seed}: {record['loss']} nats per token", flush=True)
    return record


def train(trial: Trial, data: Path, observe: Callable[[Pipeline], Hook] = lambda pipeline: Hook()) -> dict[str, Any]:
    """Train, and return the record. A run whose loss is not finite has infinite losses. ``observe`` makes one more hook."""
    torch.set_num_threads(1)
    cell, size = trial.cell, WINDOWS // trial.cell.k
    parts = {name: load_dataset("tokens", root=data, size=WINDOW, classes=VOCABULARY, split=name) for name in ("val", "test")}
    source = TrainSource(parts["val"], size, trial.seed)
    pipeline = Pipeline(
        cell.make_model(),
        TensorSpec((size, WINDOW), torch.int64),
        Recipe(
            cell.make_optimizer(),
            Cosine(trial.rate, trial.updates * cell.k, 1, trial.warmup),
            seed=trial.seed,
            rules=UpdateRules(clip=CLIP),
            extensions=cell.make_remedies(),
        ),
        method=cell.make_method(),
        k=cell.k,
        numerics=cell.make_numerics(),
    )
    errors, drift = ErrorHistory(pipeline), WeightDrift(pipeline, distance(cell.k, 8))
    losses: list[float] = []

    def note(report: Tensor) -> None:
        losses.append(report[1].item() / report[0].item())
        errors.collect()

    begun, failed = time.time(), False
    try:
        with pipeline.hooks.attached(errors), pipeline.hooks.attached(drift), pipeline.hooks.attached(observe(pipeline)):
            pipeline.train(source, trial.updates * cell.k, note)
    except NumericsError:
        failed = True
    seconds, nats = time.time() - begun, dict[str, float]()
    model = cell.make_model().build(trial.seed)
    model.load_state_dict(pipeline.state_dict())
    model.eval()
    for name, windows in (("val", VALIDATION_WINDOWS), *([("test", TEST_WINDOWS)] if trial.final else [])):
        nats[name] = math.inf if failed else mean_loss(model, parts[name].test, windows)
    bits = {name: nats[name] / math.log(2) / (parts[name].bytes_per_target or math.nan) for name in nats}
    first = pipeline.plan.stages[0]
    metrics = drift.metrics()
    return {
        "cell": cell.name,
        "setting": cell.setting,
        "delay": first.delay,
        "staleness": first.staleness,
        "rate": trial.rate,
        "warmup": trial.warmup,
        "updates": trial.updates,
        "tokens": trial.updates * WINDOWS * WINDOW,
        "seed": trial.seed,
        "loss": nats,
        "bits_per_byte": bits,
        "curve": [round(statistics.fmean(losses[i : i + cell.k]), 4) for i in range(0, len(losses), cell.k)],
        "reconstruction_error": {str(j + 1): [float(f"{e:.3g}") for e in found] for j, found in errors.history.items()},
        "weight_drift": {key.split("/")[1]: float(f"{v:.3g}") for key, v in metrics.items() if key.endswith("/weight_drift")},
        "seconds": round(seconds, 1),
        "machine": machine(),
    }


@torch.no_grad()
def mean_loss(model: nn.Module, split: Split, windows: int) -> float:
    """Return the mean loss per token over ``windows`` windows of a split, at equal distances."""
    assert split.inputs is not None
    assert split.targets is not None
    total, count = 0.0, 0
    for chosen in (torch.arange(windows) * split.count // windows).split(WINDOWS):
        targets = split.targets(chosen, None)
        total += functional.cross_entropy(model(split.inputs(chosen, None)), targets, reduction="sum").item()
        count += int((targets >= 0).sum())
    return total / count
