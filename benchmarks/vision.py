"""CIFAR-10 by PETRA and backpropagation under the staleness benchmark's rules: ``python -m benchmarks.vision ROOT --out RECORDS``.

ROOT has cifar-10-batches-py. Quarter-width RevNet-18 in ten stages, in float32, learns from 45,000 images; the other 5,000 of
the training part choose each method's learning rate, by runs of five epochs, and the test part is read at the end of final runs.
All methods make the same updates, of four microbatches of 64 images, which are also the batches of batch norm. Runs with the same
seed begin with the same weights and see the same images in the same order. Each run is written to a file of its own. Runs
that are there are not repeated, and one that was interrupted continues after its last epoch. Prints the tables, and with
``--picture`` draws the accuracies.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from benchmarks.records import recorded
from benchmarks.report import best_rate, machine, show_records
from benchmarks.staleness.cells import Cell
from benchmarks.staleness.figures import shown
from launch.runtime.terminal import command
from petra import METHODS, Numerics, Pipeline, Recipe, TensorSpec
from petra.analysis.plots import Panel, grid, save
from petra.data import Dataset, EvalSource, Split, TrainSource, load_dataset
from petra.engine.metrics import correct_predictions
from petra.engine.recipe import OptimizerFactory
from petra.model import Model
from petra.models import revnet18, revnet38
from petra.training import OPTIMIZERS, Checkpoints, MultiStep, Trainer, newest, restore, sgd
from petra.training.optim import Muon

METHOD = {
    "backprop": METHODS["backprop"],
    "petra, d = 1": replace(METHODS["petra"], delay=1),
    "petra": METHODS["petra"],
    "reversible": METHODS["reversible"],
}
"""Methods by name. ``reversible`` has one final run, with the rate of ``backprop``: it computes the same gradients."""
WIDTH, BATCH, K = 0.25, 64, 4
VALIDATION, TRAINING = 5_000, 45_000
"""Images, from the end and from the beginning of the training part."""
SHORT, EPOCHS = 5, 20
"""Epochs of a run of the search, and of a final run. The rate drops to a tenth after half and after three quarters."""
RATES = (0.025, 0.05, 0.1, 0.2)
"""Peak learning rates of the search, which goes on by a factor of 2 while the best rate is at an edge."""
SEARCH_SEED, SEEDS = 100, (0, 1, 2)
NETWORK: dict[str, Callable[[int], Model]] = {
    "revnet18": lambda classes: revnet18(classes, width=WIDTH),
    "wide": lambda classes: revnet18(classes, width=2 * WIDTH),
    "revnet38": revnet38,
}
"""Networks by name: functions of the number of classes. The benchmark's, one twice as wide, and that of Gomez et al. (2017)."""
REMEDIES = ("none", "feedback", "prediction", "fitted")
"""Names of remedies, which are those of ``benchmarks.staleness``."""


class NormalizedMuon(Muon):
    """Muon for CIFAR as Keller Jordan trains it (airbench94_muon, 2024), and SGD for parameters that are no filters or matrices.

    Before each step the weights of each layer get the norm √(output channels), so the rate is the relative change of a step. Three
    Newton-Schulz iterations, momentum 0.6, no weight decay, no scale by shape. Different from his: SGD has the same rate, since his
    fixed ones belong to his batches and sums of losses; the head is a matrix like the others; the stem is trained.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module, momentum=0.6, weight_decay=0.0, filters=True)
        for i, (part, count) in enumerate(self._parts):
            if isinstance(part, torch.optim.Muon):
                part.param_groups[0].update(ns_steps=3, adjust_lr_fn="original")
            else:
                rest = [p for group in part.param_groups for p in group["params"]]
                self._parts[i] = torch.optim.SGD(rest, lr=0.0, momentum=0.85, nesterov=True), 1
                self.param_groups[-count:] = self._parts[i][0].param_groups

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for part, _ in self._parts:
            for p in part.param_groups[0]["params"] if isinstance(part, torch.optim.Muon) else ():
                p.mul_(len(p) ** 0.5 / p.norm())
        super().step(closure)


OPTIMIZER: dict[str, tuple[OptimizerFactory, tuple[float, ...]]] = {
    "sgd": (sgd, RATES),
    "muon": (partial(OPTIMIZERS["muon"], filters=True), (0.005, 0.01, 0.02)),
    "normalized_muon": (NormalizedMuon, (0.05, 0.1, 0.2)),
    "adamw": (OPTIMIZERS["adamw"], (0.001, 0.002, 0.004)),
}
"""Optimizers by name, with the first learning rates of their search. Muon updates filters as matrices, and has one rate for all."""


def part_of(split: Split, start: int, count: int, *, augment: bool) -> Split:
    """Return ``count`` samples of a split from ``start`` on."""
    inputs: Any = split.inputs
    targets: Any = split.targets
    return replace(
        split,
        count=count,
        inputs=lambda indices, seed: inputs(indices + start, seed if augment else None),
        targets=lambda indices, seed: targets(indices + start, seed),
    )


class Setting(NamedTuple):
    """What the runs of a row of the tables share, by the names above."""

    method: str
    optimizer: str = "sgd"
    network: str = "revnet18"
    remedy: str = "none"

    @property
    def name(self) -> str:
        """Beginning of the names of its records."""
        others = [] if self.optimizer == "sgd" else [self.optimizer]
        others += [part for part, usual in ((self.network, "revnet18"), (self.remedy, "none")) if part != usual]
        return "_".join([self.method.replace(", d = ", "_d"), *others])

    @property
    def shown(self) -> str:
        """The optimizer, and the remedy if there is one."""
        return self.optimizer if self.remedy == "none" else f"{self.optimizer}, {self.remedy}"


def setting_of(record: dict[str, Any]) -> Setting:
    """Return the setting of a record; those that name no optimizer, network or remedy have the first ones."""
    return Setting(**{name: record[name] for name in Setting._fields if name in record})


def run(setting: Setting, rate: float, epochs: int, seed: int, data: Dataset, out: Path) -> dict[str, Any]:
    """Return the record of a run, which is trained now unless ``out`` has it."""
    name = f"{setting.name}__lr{rate:g}_e{epochs}_s{seed}"
    record = recorded(out, name, lambda: train(name, setting, rate, epochs, seed, data, out))
    shutil.rmtree(checkpoints_of(out, name), ignore_errors=True)
    print(f"{name}: validation {record['validation'][-1]:.2%}, {record['seconds']} s", flush=True)
    return record


def train(name: str, setting: Setting, rate: float, epochs: int, seed: int, data: Dataset, out: Path) -> dict[str, Any]:
    """Train, with a checkpoint of each epoch in ``out``, and return the record."""
    source = TrainSource(part_of(data.train, 0, TRAINING, augment=True), BATCH, seed)
    chosen = EvalSource(part_of(data.train, TRAINING, VALIDATION, augment=False), BATCH)
    schedule = MultiStep(rate, source.batches_per_epoch, epochs, warmup_epochs=1, milestones=(epochs // 2, epochs * 3 // 4))
    remedies = Cell("petra", optimizer=setting.optimizer.removeprefix("normalized_"), remedy=setting.remedy)
    pipeline = Pipeline(
        NETWORK[setting.network](data.classes),
        TensorSpec((BATCH, 3, data.size, data.size), torch.float32),
        Recipe(
            OPTIMIZER[setting.optimizer][0],
            schedule,
            metrics={"accuracy": correct_predictions},
            seed=seed,
            extensions=remedies.make_remedies(),
        ),
        method=METHOD[setting.method],
        k=K,
        numerics=Numerics(channels_last=True),
    )
    folder = checkpoints_of(out, name)
    trainer = Trainer(pipeline, source, chosen, checkpoints=Checkpoints(folder, keep=1))
    if (checkpoint := newest(folder)) is not None:
        trainer.resume(restore(pipeline, checkpoint)["trainer"])
    rows = trainer.fit(epochs)
    record = {
        **setting._asdict(),
        "staleness": pipeline.plan.stages[0].staleness,
        "rate": rate,
        "epochs": epochs,
        "seed": seed,
        "updates": pipeline.microbatches_done // K,
        "train_loss": [row["train_loss"] for row in rows],
        "validation": [row["test_accuracy"] for row in rows],
        "seconds": round(sum(row["seconds"] for row in rows), 1),
        "machine": machine(),
    }
    if seed != SEARCH_SEED:
        source_of_test = EvalSource(data, BATCH)
        record["test"] = pipeline.evaluate(source_of_test, source_of_test.batches).metrics["accuracy"]
    return record


def checkpoints_of(out: Path, name: str) -> Path:
    """Return the folder of the checkpoints of a run that is not finished."""
    return out / f"{name}.checkpoints"


def search(setting: Setting, data: Dataset, out: Path) -> float:
    """Return the rate that is best on the validation part."""
    rates = OPTIMIZER[setting.optimizer][1]
    return best_rate(rates, lambda rate: -run(setting, rate, SHORT, SEARCH_SEED, data, out)["validation"][-1])


def grouped(found: Sequence[dict[str, Any]], *, final: bool) -> dict[Setting, list[dict[str, Any]]]:
    """Return final runs, or those of the search, by setting, in the order of the names above; no setting without runs."""
    rows = [row for row in found if ("test" in row) == final]
    names = product(NETWORK, OPTIMIZER, METHOD, REMEDIES)
    keys = (Setting(method, optimizer, network, remedy) for network, optimizer, method, remedy in names)
    groups = {key: [row for row in rows if setting_of(row) == key] for key in keys}
    return {key: group for key, group in groups.items() if group}


def table(found: Sequence[dict[str, Any]]) -> str:
    """Return Markdown tables of the final runs and of the search.

    Differences are of runs with the same seed: from backpropagation with the same optimizer, from that with its best optimizer, and
    from PETRA with the same optimizer.
    """
    final = grouped(found, final=True)
    accuracies = {key: {row["seed"]: 100 * row["test"] for row in rows} for key, rows in final.items()}
    epochs = (SHORT, EPOCHS // 2, EPOCHS)
    others = "points below backprop | below the best backprop | above petra"
    others += f" | validation (%) after {', '.join(map(str, epochs))} epochs"
    lines = [f"| network | method | optimizer | staleness | rate | seeds | test accuracy (%) | {others} |", "|---" * 11 + "|"]
    for key, rows in final.items():
        own, exact = accuracies[key], key._replace(method="backprop", remedy="none")
        alternatives = [k for k in final if (k.method, k.network) == ("backprop", key.network)]
        best = max(alternatives, key=lambda k: statistics.fmean(accuracies[k].values()), default=exact)
        below = ["" if key == other else shown(accuracies.get(other, {}), own) for other in (exact, best)]
        petra = key._replace(method="petra", remedy="none")
        above = "" if key == petra else shown(own, accuracies.get(petra, {}))
        curve = ", ".join(f"{100 * statistics.fmean(row['validation'][epoch - 1] for row in rows):.1f}" for epoch in epochs)
        cells = [key.network, key.method, key.shown, f"{rows[0]['staleness']:g}", f"{rows[0]['rate']:g}", str(len(rows))]
        lines.append(f"| {' | '.join([*cells, f'{statistics.fmean(own.values()):.2f}', *below, above, curve])} |")
    lines += ["", "| network | method | optimizer | rate: validation accuracy (%) after the search's runs |", "|---" * 4 + "|"]
    for key, rows in grouped(found, final=False).items():
        tried = {row["rate"]: row["validation"][-1] for row in rows}
        text = "; ".join(f"{rate:g}: {100 * tried[rate]:.2f}" for rate in sorted(tried))
        lines.append(f"| {key.network} | {key.method} | {key.shown} | {text} |")
    return "\n".join(lines)


def draw(found: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw the mean curves of the final runs."""
    panels = []
    for key, label, unit in (("validation", "validation accuracy (%)", 100.0), ("train_loss", "training loss", 1.0)):
        curves = {own.name: [row[key] for row in rows] for own, rows in grouped(found, final=True).items()}
        lines = {
            name: [(epoch, unit * statistics.fmean(values)) for epoch, values in enumerate(zip(*rows, strict=True), 1)]
            for name, rows in curves.items()
        }
        panels.append(Panel("epoch", label, lines))
    save(grid(panels), path)


@command
def main() -> None:
    """Train what has no record, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", type=Path, help="folder that contains cifar-10-batches-py")
    parser.add_argument("--out", type=Path, required=True, help="folder of the records; or a file of them, which is only read")
    parser.add_argument("--methods", nargs="*", choices=METHOD, default=list(METHOD), help="methods to train; all by default")
    parser.add_argument("--optimizer", choices=OPTIMIZER, default="sgd", help="optimizer of the runs")
    parser.add_argument("--network", choices=NETWORK, default="revnet18", help="network of the runs")
    parser.add_argument("--remedy", choices=REMEDIES, default="none", help="remedy of the runs")
    parser.add_argument("--seeds", type=int, nargs="*", default=list(SEEDS), help="seeds of final runs; none searches only")
    parser.add_argument("--picture", type=Path, help="file of the picture")
    options = parser.parse_args()
    if options.remedy != "none" and (exact := {"backprop", "reversible"}.intersection(options.methods)):
        parser.error(f"--methods: expected methods with late gradients for --remedy, got {', '.join(sorted(exact))}")
    torch.set_num_threads(1)
    data: Any = load_dataset("cifar10", root=options.root) if options.methods else None
    for method in options.methods:
        setting = Setting(method, options.optimizer, options.network, options.remedy)
        rate = search(setting._replace(method="backprop") if method == "reversible" else setting, data, options.out)
        for seed in options.seeds[:1] if method == "reversible" else options.seeds:
            run(setting, rate, EPOCHS, seed, data, options.out)
    show_records(options, table, draw)


if __name__ == "__main__":
    main()
