"""Closing the gap: what brings PETRA's accuracy after few epochs to backpropagation's, and what that costs in time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from statistics import mean

import torch

from launch.reproduce.accuracy import SEEDS, SHORT, SMALL, mean_and_deviation
from launch.reproduce.report import Report, Request, Scale
from launch.reproduce.runs import Run, collect, job, missing
from launch.reproduce.speed import FLOPS, LATENCY, stages_of
from launch.run.markdown import table
from petra.analysis.plots import Panel
from petra.cost_model.costs import BlockCost, count_blocks
from petra.cost_model.links import Link
from petra.cost_model.simulator import predict
from petra.method import METHODS, Method
from petra.models import revnet18
from petra.plan.transport import simulated_transport
from petra.settings import TransportName
from petra.specs import TensorSpec

EXACT, PLAIN = "backprop", "petra"
FREE = "[1,3,2,1,2,1,1,1,0]"
"""RevNet-18's smallest delays that cost no throughput over the slower of LINKS: what ``method=petra_fresh`` takes there."""
TRIED: dict[str, tuple[str, ...]] = {
    EXACT: ("method=backprop",),
    PLAIN: ("method=petra",),
    "d = 1": ("method=petra", "method.delay=1"),
    "smaller microbatches": ("method=petra", "k=8", "data.batch_size=32"),
    "d = 1, smaller microbatches": ("method=petra", "method.delay=1", "k=8", "data.batch_size=32"),
    "smallest microbatches": ("method=petra", "k=16", "data.batch_size=16"),
    "smallest free delays, smaller microbatches": ("method=petra", f"method.delay={FREE}", "k=8", "data.batch_size=32"),
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
"""Settings of the search, by name."""
FINALISTS = (EXACT, PLAIN, "d = 1", "d = 1, smaller microbatches", "smallest free delays, smaller microbatches")
FULL = ("experiment=petra/cifar10", "model=revnet18", "k=4")
THREE_EPOCHS = (*SHORT, "trainer.epochs=3", "schedule.milestones=[2]")
SAME_UPDATES: dict[str, dict[str, tuple[tuple[str, ...], Method, TransportName]]] = {
    EXACT: {f"{EXACT}, pipelined": (("method=1f1b",), METHODS["1f1b"], "auto")},
    PLAIN: {f"{PLAIN} over edge": (("method=petra", "trainer.transport=edge"), METHODS["petra"], "edge")},
}
"""Of a setting: others that would train the same weights at another speed."""
LINKS = (12.5, 300.0)
"""GB/s of each direction: 100 Gb/s, NVLink."""


def search(request: Request) -> Report:
    """Every setting once, in 3 epochs."""
    smaller = f"{SMALL}, 3 epochs, one seed"
    request.require_gpus(1, smaller)
    base = FULL if request.scale is Scale.PAPER else THREE_EPOCHS
    wanted = {name: job(request, f"search_{_folder(name)}", *base, *setting) for name, setting in TRIED.items()}
    found = collect(request, wanted)
    reached = {name: 100 * run.summary["test_accuracy"] for name, run in found.items()}
    lines = [
        [name, _code(TRIED[name]), f"{reached[name]:.2f}", _closed(reached[name], reached)]
        for name in sorted(reached, key=lambda name: -reached[name])
    ]
    header = ("setting", "overrides", "test accuracy, %", "of the gap closed")
    setting = smaller if request.scale is Scale.CPU else "RevNet-18 on CIFAR-10, the paper's recipe, one seed"
    text = f"{table(header, lines)}{missing(list(wanted), found)}\n{setting[0].upper()}{setting[1:]}.\n"
    return Report(text, {name: run.record() for name, run in found.items()})


def finals(request: Request) -> Report:
    """The settings that the search found worth it, in 10 epochs with three seeds, and the time that 10 devices would need."""
    smaller = f"{SMALL}, 10 epochs, three seeds"
    request.require_gpus(1, smaller)
    base = FULL if request.scale is Scale.PAPER else SHORT
    wanted = {
        f"{name}_s{seed}": job(request, f"gap_{_folder(name)}_s{seed}", *base, *TRIED[name], f"seed={seed}")
        for name in FINALISTS
        for seed in SEEDS
    }
    found = collect(request, wanted)
    groups = {name: [found[key] for seed in SEEDS if (key := f"{name}_s{seed}") in found] for name in FINALISTS}
    reached = {name: 100 * mean(run.summary["test_accuracy"] for run in runs) for name, runs in groups.items() if runs}
    goal = float(int(min(reached.values(), default=0.0)))
    rows: list[tuple[str, str, tuple[str, ...], Method, TransportName]] = []
    for name in reached:
        rows.append((name, name, TRIED[name], _method(groups[name][0]), "auto"))
        rows += [(label, name, *how) for label, how in SAME_UPDATES.get(name, {}).items()]
    lines, curves = [], dict[str, list[tuple[float, float]]]()
    for label, name, overrides, method, transport in rows:
        runs = groups[name]
        each = mean_and_deviation([100 * run.summary["test_accuracy"] for run in runs])
        seconds = [_seconds(runs[0], method, transport, bandwidth) for bandwidth in LINKS]
        lines.append([label, _code(overrides), each, _closed(reached[name], reached)])
        course = [(epoch, 100 * mean(accuracies)) for epoch, accuracies in _epochs(runs).items()]
        first = next((epoch for epoch, accuracy in course if accuracy >= goal), None)
        lines[-1] += [f"{_images(runs[0]) / of:.0f}" for of in seconds]
        lines[-1] += ["" if first is None else f"{first * of:.0f}" for of in seconds]
        curves[label] = [(epoch * seconds[0], accuracy) for epoch, accuracy in course]
    header = (
        *("setting", "overrides", "test accuracy, %", "of the gap closed"),
        *(f"images/s, {bandwidth:g} GB/s" for bandwidth in LINKS),
        *(f"seconds to {goal:g} %, {bandwidth:g} GB/s" for bandwidth in LINKS),
    )
    setting = smaller if request.scale is Scale.CPU else "the recipe of the paper, three seeds"
    note = (
        f"Accuracies: {setting}, mean ± deviation. Speeds and times: simulated, 10 devices of {FLOPS / 1e12:g} TFLOP/s, RevNet-18 "
        f"at full width in float32, one block a stage, {1e6 * LATENCY:g} µs a message. `1f1b` makes the updates of `backprop`; "
        "a transport changes none."
    )
    panel = Panel(f"seconds, simulated, links of {LINKS[0]:g} GB/s", "test accuracy (%)", curves, powers=True)
    text = f"{table(header, lines)}{missing(list(wanted), found)}\n{note}\n"
    return Report(text, {name: run.record() for name, run in found.items()}, [panel], columns=1)


def _folder(name: str) -> str:
    return "".join(c if c.isalnum() else "_" for c in name)


def _code(overrides: Sequence[str]) -> str:
    return f"`{' '.join(overrides)}`"


def _closed(accuracy: float, reached: Mapping[str, float]) -> str:
    """How much of what PETRA is behind backpropagation this accuracy makes up for."""
    if EXACT not in reached or PLAIN not in reached or accuracy in (reached[EXACT], reached[PLAIN]):
        return ""
    return f"{100 * (accuracy - reached[PLAIN]) / (reached[EXACT] - reached[PLAIN]):.0f} %"


def _method(run: Run) -> Method:
    delay = run.summary["delay"]
    return replace(METHODS[run.summary["method"]], delay=tuple(delay) if isinstance(delay, list) else delay)


def _images(run: Run) -> int:
    """Of an epoch."""
    return int(run.rows[0]["microbatches"] * run.summary["batch_size"])


def _seconds(run: Run, method: Method, transport: TransportName, bandwidth: float) -> float:
    """Of an epoch on 10 devices with links of so many GB/s."""
    costs = stages_of(_blocks(run.summary["batch_size"]), 1 / FLOPS, method)
    boundaries = method.boundary_delays(len(costs) - 1)
    wires = simulated_transport(transport, boundaries)
    predicted = predict(costs, method, run.summary["k"], link=Link(1e9 * bandwidth, LATENCY), transport=wires)
    return float(run.rows[0]["microbatches"] * predicted.period)


@cache
def _blocks(batch: int) -> tuple[BlockCost, ...]:
    return count_blocks(revnet18(stem="cifar"), TensorSpec((batch, 3, 32, 32), torch.float32))


def _epochs(runs: Sequence[Run]) -> dict[int, list[float]]:
    """Test accuracies of all runs after each epoch."""
    found: dict[int, list[float]] = {}
    for row in (row for run in runs for row in run.rows):
        found.setdefault(row["epoch"], []).append(row["test_accuracy"])
    return found
