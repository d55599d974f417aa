"""Targets that compare accuracies of whole runs: PETRA's Tables 2 and 4 and Fig. 4."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import mean, stdev
from typing import Any

from launch.reproduce.paper import TABLE2
from launch.reproduce.report import Report, Request, Scale
from launch.reproduce.runs import Run, collect, job, missing
from launch.run.jobs import Job
from launch.run.markdown import table
from petra.analysis.plots import Panel
from petra.errors import ConfigError

SHORT = ("experiment=cifar10_short", "trainer.precision=bf16")
SIX_EPOCHS = (*SHORT, "trainer.epochs=6", "schedule.milestones=[3,5]")
SMALL = "quarter-width RevNet-18 on CIFAR-10 in bf16"
SEEDS = (0, 1, 2)
ACCUMULATIONS = (1, 2, 4, 8, 16, 32)
DATA = ("cifar10", "imagenet32", "imagenet")
ROWS = {
    "backpropagation": "reversible",
    "delayed gradients": "delayed",
    "without parameter buffer": "dsp",
    "without input buffer": "reconstruct_stashed",
    "PETRA: without either": "petra",
}
"""Table 4: row and method."""


def table2(request: Request) -> Report:
    """Accuracy by method and model; ``data=cifar10``, the default, imagenet32 or imagenet at scale=paper."""
    smaller = f"backprop of a ResNet-18, reversible and petra, {SMALL}, 10 epochs, k = 4, one seed"
    request.require_gpus(1, smaller)
    paper = request.scale is Scale.PAPER
    data = [word.removeprefix("data=") for word in request.overrides if word.startswith("data=")][-1:] or ["cifar10"]
    rows = list(TABLE2) if paper else [row for row in TABLE2 if row[1].endswith("18")]
    if paper and data[0] not in DATA:
        raise ConfigError(f"data: found {data[0]}, accepted are {', '.join(DATA)} with table2 scale=paper")
    if paper:
        request = replace(request, overrides=tuple(word for word in request.overrides if not word.startswith("data=")))
    wanted: dict[str, Job] = {}
    for method, model in rows:
        setting = (f"model={model}", f"method={method}")
        if not paper:
            wanted[f"{method}_{model}"] = job(request, f"short_{method}_{model}", *SHORT, *setting)
            continue
        ks = ACCUMULATIONS if method == "petra" else (4 if data[0] == "imagenet" else 2,)
        for k in ks:
            for seed in SEEDS if data[0] == "cifar10" else SEEDS[:1]:
                name = f"{data[0]}_{method}_{model}_k{k}_s{seed}"
                wanted[name] = job(request, name, f"experiment=petra/{data[0]}", *setting, f"k={k}", f"seed={seed}")
    found = collect(request, wanted)
    lines = []
    for method, model in rows:
        of_k: dict[int, list[Run]] = {}
        for run in (run for name, run in found.items() if f"{method}_{model}" in name):
            of_k.setdefault(run.summary["k"], []).append(run)
        if not of_k:
            continue
        k, runs = max(of_k.items(), key=lambda item: mean(run.summary["train_accuracy"] for run in item[1]))
        printed = f"{TABLE2[method, model][DATA.index(data[0])]:.1f} %" if paper else "–"
        parameters = f"{runs[0].summary['parameters'] / 1e6:.2f}"
        lines.append([method, model, parameters, str(k), f"{100 * mean(_accuracies(runs)):.2f} %", printed])
    text = table(("method", "model", "million parameters", "k", "test accuracy", "paper"), lines) + missing(list(wanted), found)
    note = "k of PETRA: the best on the training data, as in the paper." if paper else f"Smaller than the paper: {smaller}."
    return Report(f"{text}\n{note}\n", _records(found))


def table4(request: Request) -> Report:
    """Accuracy of the five rows at k = 1, three seeds."""
    smaller = f"{SMALL}, 6 epochs, three seeds"
    request.require_gpus(1, smaller)
    models = ("revnet18", "revnet34", "revnet50") if request.scale is Scale.PAPER else ("revnet18",)
    base = ("experiment=petra/cifar10",) if request.scale is Scale.PAPER else SIX_EPOCHS
    wanted = {
        f"{model}_{method}_s{seed}": job(
            request, f"t4_{model}_{method}_s{seed}", *base, f"model={model}", f"method={method}", "k=1", f"seed={seed}"
        )
        for model in models
        for method in ROWS.values()
        for seed in SEEDS
    }
    found = collect(request, wanted)
    lines = []
    for model in models:
        exact: float | None = None
        for row, method in ROWS.items():
            runs = [run for name, run in found.items() if name.startswith(f"{model}_{method}_s")]
            accuracies = [100 * accuracy for accuracy in _accuracies(runs)]
            if not accuracies:
                continue
            exact = mean(accuracies) if method == "reversible" else exact
            behind = "" if exact is None or method == "reversible" else f"{exact - mean(accuracies):.2f}"
            each = ", ".join(f"{accuracy:.2f}" for accuracy in accuracies)
            lines.append([model, row, f"`{method}`", mean_and_deviation(accuracies), behind, each])
    header = ("model", "row", "here", "test accuracy, % (mean ± deviation)", "behind backpropagation", "each seed")
    note = "The paper's own figures were not at hand. Backpropagation is done by `reversible`, whose gradients are the same." + (
        "" if request.scale is Scale.PAPER else f" Smaller than the paper: {smaller}."
    )
    return Report(f"{table(header, lines)}{missing(list(wanted), found)}\n{note}\n", _records(found))


def fig4(request: Request) -> Report:
    """Accuracy against k; the mean over the last 10 epochs, as in the paper, or the last epoch."""
    smaller = f"{SMALL}, 6 epochs, one seed, the last epoch"
    request.require_gpus(1, smaller)
    paper = request.scale is Scale.PAPER
    base = ("experiment=petra/imagenet", "model=revnet18") if paper else SIX_EPOCHS
    wanted = {
        f"k{k}_{method}": job(request, f"k{k}_{method}", *base, f"method={method}", f"k={k}")
        for k in ACCUMULATIONS
        for method in ("petra", "reversible")
    }
    found = collect(request, wanted)
    values = {name: 100 * mean(row["test_accuracy"] for row in run.rows[-(10 if paper else 1) :]) for name, run in found.items()}
    lines = []
    for k in ACCUMULATIONS:
        pair = [values.get(f"k{k}_{method}") for method in ("petra", "reversible")]
        age = [f"{_delay(run) / k:g}" for name, run in found.items() if name == f"k{k}_petra"]
        behind = f"{pair[1] - pair[0]:.2f}" if pair[0] is not None and pair[1] is not None else ""
        lines.append([str(k), *("" if v is None else f"{v:.2f} %" for v in pair), behind, *(age or [""])])
    header = ("k", "PETRA", "reversible backprop", "behind", "age of the first stage's gradient (updates)")
    drawn = {
        label: [(k, values[f"k{k}_{method}"]) for k in ACCUMULATIONS if f"k{k}_{method}" in values]
        for label, method in (("PETRA", "petra"), ("reversible backprop", "reversible"))
    }
    note = "The paper's curves meet at k = 32 (RevNet-18 on ImageNet); it prints no numbers." + (
        "" if paper else f" Smaller than the paper: {smaller}."
    )
    panel = Panel("k, microbatches of 64 images per update", "test accuracy (%)", drawn, powers=True)
    text = f"{table(header, lines)}{missing(list(wanted), found)}\n{note}\n"
    return Report(text, {"accuracies": values, "runs": _records(found)}, [panel], columns=1)


def mean_and_deviation(values: Sequence[float]) -> str:
    """As ``79.31 ± 0.50``; without a deviation of a single value."""
    return f"{mean(values):.2f}" + (f" ± {stdev(values):.2f}" if len(values) > 1 else "")


def _accuracies(runs: Sequence[Run]) -> list[float]:
    return [run.summary["test_accuracy"] for run in runs]


def _delay(run: Run) -> int:
    """τ of the first stage."""
    delay: int | list[int] = run.summary["delay"]
    return sum(delay) if isinstance(delay, list) else delay * (int(run.summary["stages"]) - 1)


def _records(found: dict[str, Run]) -> dict[str, Any]:
    return {name: run.record() for name, run in found.items()}
