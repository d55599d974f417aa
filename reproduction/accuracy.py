"""Targets that compare the accuracy of whole runs: PETRA's Tables 2 and 4 and Fig. 4."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import mean, stdev

from launch.runtime.terminal import table
from petra.analysis.plots import Panel
from petra.errors import require

from .jobs import Job
from .paper import DATASETS, PARAMETERS, PETRA_ACCUMULATIONS, REVNETS, TABLE2, TABLE4
from .report import Report, Request, Scale, ran
from .runs import Run, collect, job, missing, records

SHORT = ("experiment=cifar10_short", "trainer.precision=bf16")
SIX_EPOCHS = (*SHORT, "trainer.epochs=6", "schedule.milestones=[3,5]")
QUARTER_WIDTH = "quarter-width RevNet-18 on CIFAR-10 in bf16"
SEEDS = (0, 1, 2)
ACCUMULATIONS = PETRA_ACCUMULATIONS
ROWS = {
    "backpropagation": "reversible",
    "delayed gradients": "delayed",
    "without parameter buffers": "dsp",
    "without input buffers": "reconstruct_stashed",
    "PETRA: without either": "petra",
}
"""Rows of Table 4, with the method of each."""


def table2(request: Request) -> Report:
    """Compare accuracy by method and model (PETRA, Table 2).

    At scale=paper the override ``data`` selects cifar10 (default), imagenet32 or imagenet.
    """
    smaller = f"backprop of a ResNet-18, reversible and petra, {QUARTER_WIDTH}, 10 epochs, k = 4 in every row, one seed"
    request.require_gpus(1, smaller)
    paper = request.scale is Scale.PAPER
    data, request = _data_of(request, "cifar10")
    if paper:
        require(data in DATASETS, "data", f"one of {', '.join(DATASETS)} for table2 at scale=paper", data)
    wanted = _table2_jobs(request, data)
    found = collect(request, wanted)
    lines = []
    for (method, model), published in TABLE2.items():
        by_k: dict[int, list[Run]] = {}
        for run in (run for name, run in found.items() if f"{method}_{model}" in name):
            by_k.setdefault(run.summary["k"], []).append(run)
        ours = ["–"] * 4
        if by_k:
            k, runs = max(by_k.items(), key=lambda item: mean(run.summary["train_accuracy"] for run in item[1]))
            last, best = (f"{100 * mean(values):.2f}" for values in (_accuracies(runs), map(best_after_last_drop, runs)))
            ours = [f"{runs[0].summary['parameters'] / 1e6:.2f}", str(k), last, best]
        printed = ["–" if accuracy is None else f"{accuracy:.1f}" for accuracy in published]
        lines.append([method, model, f"{PARAMETERS[model]:.1f}", *printed, *ours])
    header = (
        *("method", "model", "million parameters, paper", "CIFAR-10, paper", "ImageNet32, paper", "ImageNet, paper"),
        *("million parameters", "k", f"{data}, last epoch", f"{data}, best after the last drop"),
    )
    note = (
        "Test accuracy in %. The paper reports the best accuracy after the last drop of the learning rate. For PETRA, k is the one "
        f"with the best training accuracy, as in the paper. {ran(request, smaller)}"
    )
    return Report(f"{table(header, lines)}{missing(list(wanted), found)}\n{note}\n", records(found))


def best_after_last_drop(run: Run) -> float:
    """Return the best test accuracy among the epochs that end with the same learning rate as the last one (PETRA, section 4.1)."""
    last = run.rows[-1]
    rate = last.get("learning_rate")
    rows = [last] if rate is None else [row for row in run.rows if row["learning_rate"] == rate]
    return float(max(row["test_accuracy"] for row in rows))


def table4(request: Request) -> Report:
    """Compare the accuracy of delayed gradients with and without buffers on CIFAR-100, at k = 1 (PETRA, Table 4).

    The override ``data`` selects another data set.
    """
    smaller = "quarter-width RevNet-18 in bf16, 6 epochs, three seeds"
    request.require_gpus(1, smaller)
    data, request = _data_of(request, "cifar100")
    models = REVNETS if request.scale is Scale.PAPER else REVNETS[:1]
    base = ("experiment=petra/cifar10",) if request.scale is Scale.PAPER else SIX_EPOCHS
    wanted = {
        f"{model}_{method}_s{seed}": job(
            request,
            f"t4_{data}_{model}_{method}_s{seed}",
            *(*base, f"data={data}", f"model={model}", f"method={method}", "k=1", f"seed={seed}"),
        )
        for model in models
        for method in ROWS.values()
        for seed in SEEDS
    }
    found = collect(request, wanted)
    lines, reached = [], dict[str, dict[str, float]]()
    for column, model in enumerate(REVNETS):
        published = {method: values[column] for method, values in TABLE4.items()}
        ours = reached.setdefault(model, {})
        for row, method in ROWS.items():
            runs = [run for name, run in found.items() if name.startswith(f"{model}_{method}_s")]
            accuracies = [100 * accuracy for accuracy in _accuracies(runs)]
            lines.append([model, row, f"`{method}`", f"{published[method]:.1f}", _below(published, method)])
            if accuracies:
                ours[method] = mean(accuracies)
                by_seed = ", ".join(f"{accuracy:.2f}" for accuracy in accuracies)
                lines[-1] += [mean_and_deviation(accuracies), _below(ours, method), by_seed]
            else:
                lines[-1] += ["–"] * 3
    header = (
        *("model", "row", "method", "paper, %", "paper, below backpropagation"),
        *("ours, % (mean ± standard deviation)", "below backpropagation", "each seed"),
    )
    note = f"The method `reversible` stands for backpropagation, because its gradients are the same. {ran(request, smaller)}"
    text = f"{table(header, lines)}{missing(list(wanted), found)}\n{_approximations(reached)}\n{note}\n"
    return Report(text, records(found))


def _below(accuracies: Mapping[str, float], method: str) -> str:
    """Return by how many points a method is below backpropagation, or an empty string for backpropagation itself."""
    if method == "reversible" or not {method, "reversible"} <= accuracies.keys():
        return ""
    return f"{accuracies['reversible'] - accuracies[method]:.1f}"


def _approximations(reached: Mapping[str, Mapping[str, float]]) -> str:
    """Return the table of the points that each approximation costs, with exact and with approximated other buffer."""
    pairs = {
        "inputs, exact weights": ("delayed", "reconstruct_stashed"),
        "inputs, approximated weights": ("dsp", "petra"),
        "weights, exact inputs": ("delayed", "dsp"),
        "weights, approximated inputs": ("reconstruct_stashed", "petra"),
    }
    lines = []
    for column, model in enumerate(REVNETS):
        for name, (before, after) in pairs.items():
            published = TABLE4[before][column] - TABLE4[after][column]
            ours = reached[model]
            cost = f"{ours[before] - ours[after]:.1f}" if {before, after} <= ours.keys() else "–"
            lines.append([model, name, f"{published:.1f}", cost])
    return "Points that an approximation costs:\n\n" + table(("model", "approximated", "paper", "ours"), lines)


def fig4(request: Request) -> Report:
    """Compare accuracy at different k (PETRA, Fig. 4): the mean of the last 10 epochs as in the paper, or the last epoch."""
    smaller = f"{QUARTER_WIDTH}, 6 epochs, one seed, the last epoch"
    request.require_gpus(1, smaller)
    paper = request.scale is Scale.PAPER
    base = ("experiment=petra/imagenet", "model=revnet18") if paper else SIX_EPOCHS
    wanted = {
        f"k{k}_{method}": job(request, f"k{k}_{method}", *base, f"method={method}", f"k={k}")
        for k in ACCUMULATIONS
        for method in ("petra", "reversible")
    }
    found = collect(request, wanted)
    epochs = 10 if paper else 1
    values = {name: 100 * mean(row["test_accuracy"] for row in run.rows[-epochs:]) for name, run in found.items()}
    curves = {
        label: [(k, values[f"k{k}_{method}"]) for k in ACCUMULATIONS if f"k{k}_{method}" in values]
        for label, method in (("PETRA", "petra"), ("reversible backprop", "reversible"))
    }
    note = (
        "Paper: RevNet-18 on ImageNet, mean of the last 10 epochs; no numbers are printed, and the curves meet at k = 32. "
        f"{ran(request, smaller)}"
    )
    panel = Panel("k, microbatches of 64 images per update", "test accuracy (%)", curves, powers=True)
    text = f"{_fig4_table(found, values)}{missing(list(wanted), found)}\n{note}\n"
    return Report(text, {"accuracies": values, "runs": records(found)}, [panel], columns=1)


def mean_and_deviation(values: Sequence[float]) -> str:
    """Return mean and standard deviation as ``79.31 ± 0.50``, or only the value if there is one."""
    return f"{mean(values):.2f}" + (f" ± {stdev(values):.2f}" if len(values) > 1 else "")


def _data_of(request: Request, default: str) -> tuple[str, Request]:
    """Return the data set that the overrides select, and the request without this override."""
    names = [word.removeprefix("data=") for word in request.overrides if word.startswith("data=")]
    overrides = tuple(word for word in request.overrides if not word.startswith("data="))
    return (names or [default])[-1], replace(request, overrides=overrides)


def _table2_jobs(request: Request, data: str) -> dict[str, Job]:
    """Return the runs of Table 2 by name."""
    wanted: dict[str, Job] = {}
    for method, model in (row for row in TABLE2 if row[0] != "torchvision"):
        setting = (f"model={model}", f"method={method}")
        if request.scale is Scale.CPU:
            if model.endswith("18"):
                wanted[f"{method}_{model}"] = job(request, f"short_{data}_{method}_{model}", *SHORT, f"data={data}", *setting)
            continue
        preset = f"experiment=petra/{data}" if method == "petra" else f"experiment=petra/{data}_backprop"
        for k in ACCUMULATIONS if method == "petra" else (1,):
            for seed in SEEDS if data == "cifar10" else SEEDS[:1]:
                wanted[f"{data}_{method}_{model}_k{k}_s{seed}"] = job(
                    request, f"{data}_{method}_{model}_k{k}_s{seed}", preset, *setting, f"k={k}", f"seed={seed}"
                )
    return wanted


def _fig4_table(found: Mapping[str, Run], values: Mapping[str, float]) -> str:
    """Return the table of Fig. 4, given the accuracy of each run."""
    lines = []
    for k in ACCUMULATIONS:
        petra, reversible = (values.get(f"k{k}_{method}") for method in ("petra", "reversible"))
        gap = f"{reversible - petra:.2f}" if petra is not None and reversible is not None else ""
        staleness = f"{_first_delay(found[f'k{k}_petra']) / k:g}" if f"k{k}_petra" in found else ""
        lines.append([str(k), *("" if v is None else f"{v:.2f} %" for v in (petra, reversible)), gap, staleness])
    return table(("k", "PETRA", "reversible backprop", "difference", "staleness of the first stage's gradient (updates)"), lines)


def _accuracies(runs: Sequence[Run]) -> list[float]:
    return [run.summary["test_accuracy"] for run in runs]


def _first_delay(run: Run) -> int:
    """Return τ of the first stage."""
    delay: int | list[int] = run.summary["delay"]
    return sum(delay) if isinstance(delay, list) else delay * (int(run.summary["stages"]) - 1)
