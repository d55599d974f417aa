"""Targets that compare gradients during training: PETRA's Fig. 5 and 6, RevNet's Fig. 4."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from statistics import mean
from typing import Any

from petra.analysis.plots import Panel, by_stage
from petra.errors import invalid, require

from ..run.markdown import table
from .accuracy import SIX_EPOCHS, SMALL
from .report import Report, Request, Scale
from .runs import Run, collect, job

Row = dict[str, float]
PAIRS = {"end_to_end": "PETRA to end-to-end", "delayed": "PETRA to delayed", "delayed_end_to_end": "delayed to end-to-end"}


def fig5(request: Request) -> Report:
    """Measure the cosines between PETRA's gradient, the delayed and the end-to-end gradient, by stage (PETRA, Fig. 5)."""
    run, rows = _diagnosed_run(request)
    return _report(run, rows, "cosine", "cosine")


def fig6(request: Request) -> Report:
    """Measure the ratios between the norms of the gradients of Fig. 5, from the same run (PETRA, Fig. 6)."""
    run, rows = _diagnosed_run(request)
    for row in rows:
        if "norm_ratio_delayed" in row:
            row["norm_ratio_delayed_end_to_end"] = row["norm_ratio_end_to_end"] / row["norm_ratio_delayed"]
    return _report(run, rows, "norm_ratio", "ratio of norms")


def revnet_fig4(request: Request) -> Report:
    """Measure the angle between the gradients from reconstructed and from stored activations, and train with both (RevNet, Fig. 4).

    The gradient is that of the whole network.
    """
    smaller = "RevNet-38 on CIFAR-10, 2 epochs"
    request.require_gpus(1, smaller)
    base: tuple[str, ...]
    if request.scale is Scale.PAPER:
        base, diagnose = ("model=revnet164",), "trainer.diagnose=1000"
    else:
        base, diagnose = ("model=revnet38", "trainer.epochs=2", "schedule.milestones=[1]"), "trainer.diagnose=50"
    base = ("experiment=revnet/cifar10", *base, "trainer.stages=1")
    wanted = {
        "reversible": job(request, "revnet_reversible", *base, "method=reversible", diagnose),
        "backprop": job(request, "revnet_backprop", *base, "method=backprop"),
    }
    found = collect(request, wanted)
    run = _required(found, "reversible")
    rows = _rows(run)
    angles = [[f"{row['microbatch']:.0f}", f"{row['angle_stored']:.2g}"] for row in _sample(rows)]
    finals = [
        [name, f"{run.rows[-1]['train_loss']:.4f}", f"{100 * run.summary['test_accuracy']:.2f} %"] for name, run in found.items()
    ]
    text = table(("microbatch", "angle, degrees"), angles) + "\n" + table(("method", "train loss", "test accuracy"), finals)
    losses = {name: [(row["epoch"], row["train_loss"]) for row in run.rows] for name, run in found.items()}
    accuracies = {name: [(row["epoch"], 100 * row["test_accuracy"]) for row in run.rows] for name, run in found.items()}
    diagrams = [
        Panel("microbatch", "angle (degrees)", {"reversible": by_stage(rows, "angle_stored")["stage 1"]}, "symlog"),
        Panel("epoch", "train loss", losses),
        Panel("epoch", "test accuracy (%)", accuracies),
    ]
    note = "`backprop` stores the activations of the same network."
    if request.scale is Scale.CPU:
        note += f" Smaller than the paper: {smaller}."
    data = {"rows": rows, "runs": {name: run.record() for name, run in found.items()}}
    return Report(f"{text}\n{note}\n", data, diagrams, columns=3)


def _diagnosed_run(request: Request) -> tuple[Run, list[Row]]:
    """Return the run that Fig. 5 and 6 share, and its diagnosis."""
    request.require_gpus(1, f"{SMALL}, k = 1, 6 epochs")
    paper = request.scale is Scale.PAPER
    base = ("experiment=petra/cifar10", "model=revnet18") if paper else SIX_EPOCHS
    diagnose = "trainer.diagnose=2000" if paper else "trainer.diagnose=100"
    wanted = {"petra": job(request, "gradients_petra", *base, "method=petra", "k=1", diagnose)}
    run = _required(collect(request, wanted), "petra")
    return run, _rows(run)


def _report(run: Run, rows: Sequence[Row], quantity: str, label: str) -> Report:
    stages = sorted({int(row["stage"]) for row in rows})
    keys = [f"{quantity}_{pair}" for pair in PAIRS]
    lines = [
        [str(stage), *(f"{mean(row[key] for row in rows if row['stage'] == stage):.3f}" for key in keys)]
        for stage in stages
        if any(keys[0] in row for row in rows if row["stage"] == stage)
    ]
    text = f"Mean over {len(rows) // len(stages)} microbatches, {label}:\n\n" + table(("stage", *PAIRS.values()), lines)
    note = (
        "The end-to-end gradient uses the weights at the time when the microbatch reaches the loss, and all parameters of a stage "
        "form one vector. The authors' program uses the weights at the time of the stage's backward, and averages over the tensors "
        "of a stage."
    )
    diagrams = [
        Panel("microbatch", f"{label}, {name}", by_stage(rows, key)) for key, name in zip(keys, PAIRS.values(), strict=True)
    ]
    data: Mapping[str, Any] = {"rows": list(rows), "run": run.record()}
    return Report(f"{text}\n{note}\n", data, diagrams, columns=3, shaded=True)


def _required(found: Mapping[str, Run], name: str) -> Run:
    if name not in found:
        raise invalid("--gather", "a finished run with these settings and trainer.diagnose in --out or --runs", "none")
    return found[name]


def _rows(run: Run) -> list[Row]:
    """Return the rows that the diagnosis wrote.

    Raises:
        ConfigError: If the file does not exist.
    """
    path = run.folder / "gradients.jsonl"
    require(path.exists(), "--runs", "runs with trainer.diagnose, which write gradients.jsonl", f"{run.folder} without it")
    return [json.loads(line) for line in path.read_text().splitlines()]


def _sample(rows: Sequence[Row], count: int = 10) -> list[Row]:
    """Return about ``count`` rows at equal distances, with the first and the last."""
    step = max(1, math.ceil((len(rows) - 1) / (count - 1)))
    return [*rows[:-1:step], rows[-1]]
