"""Targets that compare settings by accuracy and time: which bring PETRA closer to backpropagation after few epochs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from statistics import mean

import torch

from petra.analysis.plots import Panel
from petra.cost_model.costs import StageCost, count_blocks
from petra.cost_model.links import Link
from petra.cost_model.simulator import predict
from petra.method import METHODS, Method, Split
from petra.models import revnet18
from petra.plan.plan import Plan, make_plan
from petra.plan.transport import simulated_transport
from petra.settings import TransportName
from petra.specs import TensorSpec

from ..run.markdown import table
from .accuracy import SEEDS, SHORT, SMALL, mean_and_deviation
from .report import Report, Request, Scale
from .runs import Run, collect, folder_name, job, missing
from .speed import FLOPS, LATENCY, stage_costs

EXACT, PLAIN = "backprop", "petra"
FREE = "[1,3,2,1,2,1,1,1,0]"
"""Smallest delays of RevNet-18 that cost no throughput over the slower of LINKS, as ``method=petra_fresh`` chooses them there."""
FREE_EARLY = "[1,2,2,1,1,1,1,1,0]"
"""The same with split backward passes."""
TRIED: dict[str, tuple[str, ...]] = {
    EXACT: ("method=backprop",),
    PLAIN: ("method=petra",),
    "d = 1": ("method=petra", "method.delay=1"),
    "smaller microbatches": ("method=petra", "k=8", "data.batch_size=32"),
    "d = 1, smaller microbatches": ("method=petra", "method.delay=1", "k=8", "data.batch_size=32"),
    "smallest microbatches": ("method=petra", "k=16", "data.batch_size=16"),
    "smallest free delays, smaller microbatches": ("method=petra", f"method.delay={FREE}", "k=8", "data.batch_size=32"),
    "smallest free delays with early sends, smaller microbatches": (
        *("method=petra", "method.split=input_first", f"method.delay={FREE_EARLY}", "k=8", "data.batch_size=32"),
    ),
    "less momentum": ("method=petra", "optim.momentum=0.5", "optim.lr=0.2"),
    "longer warm-up": ("method=petra", "schedule.warmup_epochs=2"),
    "discount": ("method=petra", "remedy=discount"),
    "PipeMare": ("method=petra", "remedy=pipemare"),
    "prediction": ("method=petra", "remedy=prediction"),
    "compensation": ("method=petra", "remedy=compensation"),
    "compensation and prediction": ("method=petra", "remedy=compensation_prediction"),
    "shrinking": ("method=petra", "remedy=shrinking"),
    "look-ahead": ("method=petra", "remedy=lookahead"),
    "look-ahead, the step of momentum 0.9": ("method=petra", "remedy=lookahead", "optim.lr=1.0"),
    "lower rate": ("method=petra", "optim.lr=0.05"),
}
"""Overrides of each setting of the search, by name."""
FINALISTS = (
    *(EXACT, PLAIN, "d = 1", "d = 1, smaller microbatches", "smallest free delays, smaller microbatches"),
    "smallest free delays with early sends, smaller microbatches",
)
FULL = ("experiment=petra/cifar10", "model=revnet18", "k=4")
THREE_EPOCHS = (*SHORT, "trainer.epochs=3", "schedule.milestones=[2]")
LINKS = (12.5, 300.0)
"""Link bandwidths in GB/s, each direction: 100 Gb/s Ethernet, NVLink."""


@dataclass(frozen=True)
class Row:
    """One row of the final table: a way to train, with the accuracies of the setting ``trained``.

    Attributes:
        name: Name of the row.
        trained: Setting whose runs have the same weights.
    """

    name: str
    trained: str
    overrides: tuple[str, ...]
    method: Method
    transport: TransportName = "auto"


EARLY = replace(METHODS["petra"], split=Split.INPUT_FIRST)
SAME_WEIGHTS = (
    Row("d = 1, early sends", "d = 1", ("method=petra", "method.delay=1", "method.split=input_first"), replace(EARLY, delay=1)),
    Row(
        "d = 1, smaller microbatches, early sends",
        "d = 1, smaller microbatches",
        (*TRIED["d = 1, smaller microbatches"], "method.split=input_first"),
        replace(EARLY, delay=1),
    ),
    Row(f"{EXACT}, pipelined", EXACT, ("method=1f1b",), METHODS["1f1b"]),
    Row(f"{PLAIN} over edge", PLAIN, ("method=petra", "trainer.transport=edge"), METHODS["petra"], "edge"),
)
"""Rows that train the same weights as one of the settings, at another speed."""


def search(request: Request) -> Report:
    """Train every setting once, for 3 epochs, and compare the accuracies."""
    smaller = f"{SMALL}, 3 epochs, one seed"
    request.require_gpus(1, smaller)
    base = FULL if request.scale is Scale.PAPER else THREE_EPOCHS
    wanted = {name: job(request, f"search_{folder_name(name)}", *base, *setting) for name, setting in TRIED.items()}
    found = collect(request, wanted)
    reached = {name: 100 * run.summary["test_accuracy"] for name, run in found.items()}
    lines = [
        [name, _code(TRIED[name]), f"{reached[name]:.2f}", _gap_closed(reached[name], reached)]
        for name in sorted(reached, key=lambda name: -reached[name])
    ]
    header = ("setting", "overrides", "test accuracy, %", "gap closed")
    setting = smaller if request.scale is Scale.CPU else "RevNet-18 on CIFAR-10, the paper's recipe, one seed"
    text = f"{table(header, lines)}{missing(list(wanted), found)}\n{setting[0].upper()}{setting[1:]}.\n"
    return Report(text, {name: run.record() for name, run in found.items()})


def finals(request: Request) -> Report:
    """Train the best settings of the search for 10 epochs with three seeds, and simulate the time that 10 devices would need."""
    smaller = f"{SMALL}, 10 epochs, three seeds"
    request.require_gpus(1, smaller)
    base = FULL if request.scale is Scale.PAPER else SHORT
    wanted = {
        f"{name}_s{seed}": job(request, f"gap_{folder_name(name)}_s{seed}", *base, *TRIED[name], f"seed={seed}")
        for name in FINALISTS
        for seed in SEEDS
    }
    found = collect(request, wanted)
    groups = {name: [found[key] for seed in SEEDS if (key := f"{name}_s{seed}") in found] for name in FINALISTS}
    groups = {name: runs for name, runs in groups.items() if runs}
    reached = {name: 100 * mean(run.summary["test_accuracy"] for run in runs) for name, runs in groups.items()}
    goal = float(int(min(reached.values(), default=0.0)))
    lines, curves = [], dict[str, list[tuple[float, float]]]()
    for row in _rows(groups):
        runs = groups[row.trained]
        accuracies = mean_and_deviation([100 * run.summary["test_accuracy"] for run in runs])
        seconds = [_epoch_seconds(runs[0], row, bandwidth) for bandwidth in LINKS]
        by_epoch = [(epoch, 100 * mean(values)) for epoch, values in _accuracies_by_epoch(runs).items()]
        first = next((epoch for epoch, accuracy in by_epoch if accuracy >= goal), None)
        lines.append([row.name, _code(row.overrides), accuracies, _gap_closed(reached[row.trained], reached)])
        lines[-1] += [f"{_images_per_epoch(runs[0]) / s:.0f}" for s in seconds]
        lines[-1] += ["" if first is None else f"{first * s:.0f}" for s in seconds]
        curves[row.name] = [(epoch * seconds[0], accuracy) for epoch, accuracy in by_epoch]
    header = (
        *("setting", "overrides", "test accuracy, %", "gap closed"),
        *(f"images/s, {bandwidth:g} GB/s" for bandwidth in LINKS),
        *(f"seconds to {goal:g} %, {bandwidth:g} GB/s" for bandwidth in LINKS),
    )
    setting = smaller if request.scale is Scale.CPU else "the recipe of the paper, three seeds"
    note = (
        f"Accuracies: {setting}, mean ± standard deviation. Speeds and times: simulated for 10 devices of {FLOPS / 1e12:g} "
        f"TFLOP/s, RevNet-18 at full width in float32, one block per stage, {1e6 * LATENCY:g} µs per message. `1f1b` makes the "
        "same updates as `backprop`. The transport does not affect the updates."
    )
    panel = Panel(f"simulated seconds with links of {LINKS[0]:g} GB/s", "test accuracy (%)", curves, powers=True)
    text = f"{table(header, lines)}{missing(list(wanted), found)}\n{note}\n"
    return Report(text, {name: run.record() for name, run in found.items()}, [panel], columns=1)


@cache
def revnet18_plan(batch: int, k: int, method: Method) -> tuple[Plan, list[StageCost]]:
    """Return the plan of RevNet-18 with one block per stage, and the cost of each stage on the simulated device."""
    model, inputs = revnet18(stem="cifar"), TensorSpec((batch, 3, 32, 32), torch.float32)
    plan = make_plan(model, inputs, method=method, k=k)
    return plan, stage_costs(plan, count_blocks(model, inputs), 1 / FLOPS)


def _rows(groups: Mapping[str, Sequence[Run]]) -> list[Row]:
    """Return the rows of the settings with finished runs, each followed by the rows that train the same weights."""
    rows = []
    for name, runs in groups.items():
        rows.append(Row(name, name, TRIED[name], _method(runs[0], TRIED[name])))
        rows += [row for row in SAME_WEIGHTS if row.trained == name]
    return rows


def _code(overrides: Sequence[str]) -> str:
    return f"`{' '.join(overrides)}`"


def _gap_closed(accuracy: float, reached: Mapping[str, float]) -> str:
    """Return the part of the gap between PETRA and backpropagation that this accuracy closes."""
    if EXACT not in reached or PLAIN not in reached or len({reached[EXACT], reached[PLAIN], accuracy}) < 3:
        return ""
    return f"{100 * (accuracy - reached[PLAIN]) / (reached[EXACT] - reached[PLAIN]):.0f} %"


def _method(run: Run, overrides: Sequence[str]) -> Method:
    delay = run.summary["delay"]
    split = Split.INPUT_FIRST if f"method.split={Split.INPUT_FIRST}" in overrides else Split.NONE
    return replace(METHODS[run.summary["method"]], delay=tuple(delay) if isinstance(delay, list) else delay, split=split)


def _images_per_epoch(run: Run) -> int:
    return int(run.rows[0]["microbatches"] * run.summary["batch_size"])


def _epoch_seconds(run: Run, row: Row, bandwidth: float) -> float:
    """Return the simulated seconds per epoch on 10 devices with links of ``bandwidth`` GB/s."""
    plan, costs = revnet18_plan(run.summary["batch_size"], run.summary["k"], row.method)
    transport = simulated_transport(row.transport, plan.boundary_delays)
    predicted = predict(costs, plan.method, plan.k, link=Link(1e9 * bandwidth, LATENCY), transport=transport)
    return float(run.rows[0]["microbatches"] * predicted.period)


def _accuracies_by_epoch(runs: Sequence[Run]) -> dict[int, list[float]]:
    """Return the test accuracies of all runs after each epoch."""
    found: dict[int, list[float]] = {}
    for row in (row for run in runs for row in run.rows):
        found.setdefault(row["epoch"], []).append(row["test_accuracy"])
    return found
