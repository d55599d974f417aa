"""Target that compares PETRA's accuracy with backpropagation's on schedules of different length."""

from __future__ import annotations

from collections.abc import Mapping

from petra.analysis.plots import Panel

from ..run.jobs import Job
from ..run.markdown import table
from .accuracy import SHORT, SMALL, best_after_last_drop
from .gap import FREE, FULL
from .report import Report, Request, Scale, ran
from .runs import Run, collect, job, missing

EXACT = "backprop"
SCHEDULES = {
    10: ("trainer.epochs=10", "schedule.warmup_epochs=1", "schedule.milestones=[5,8]"),
    20: ("trainer.epochs=20", "schedule.warmup_epochs=1", "schedule.milestones=[10,15]"),
    100: ("trainer.epochs=100", "schedule.warmup_epochs=5", "schedule.milestones=[50,75]"),
}
"""Overrides of each schedule, by its number of epochs. That of 10 epochs is the one of ``experiment=cifar10_short``."""
METHODS = {
    EXACT: ("method=backprop", "k=4"),
    "petra, d = 2": ("method=petra", "k=8"),
    "petra_fresh, smaller microbatches": ("method=petra_fresh", f"method.delay={FREE}", "k=8", "data.batch_size=32"),
}
"""Overrides of each method. PETRA's k is the best of 4, 8 and 16 after 6 epochs (Fig. 4)."""


def parity(request: Request) -> Report:
    """Train each method once per schedule, and compare the accuracies at the end."""
    smaller = f"{SMALL}, one seed"
    request.require_gpus(1, smaller)
    base = FULL if request.scale is Scale.PAPER else SHORT
    wanted: dict[tuple[str, int], Job] = {
        (method, epochs): job(request, f"parity_{setting[0].removeprefix('method=')}_{epochs}", *base, *setting, *schedule)
        for epochs, schedule in SCHEDULES.items()
        for method, setting in METHODS.items()
    }
    names = {f"{method}, {epochs} epochs": (method, epochs) for method, epochs in wanted}
    by_name = collect(request, {name: wanted[key] for name, key in names.items()})
    found = {names[name]: run for name, run in by_name.items()}
    header = ("method", "overrides", "epochs", "last epoch, %", "below backprop", "best after the last drop, %", "below backprop")
    lines = [
        [method, f"`{' '.join(METHODS[method])}`", str(epochs), *_cells(found, method, epochs)]
        for epochs in SCHEDULES
        for method in METHODS
        if (method, epochs) in found
    ]
    text = f"{table(header, lines)}{missing(list(names), by_name)}\n{ran(request, smaller)}\n"
    return Report(text, {name: run.record() for name, run in by_name.items()}, _panels(found))


def _cells(found: Mapping[tuple[str, int], Run], method: str, epochs: int) -> list[str]:
    """Return the accuracies of one run, each followed by the points that it is below backpropagation's."""
    cells = []
    for accuracy in (_last, best_after_last_drop):
        reached = 100 * accuracy(found[method, epochs])
        exact = found.get((EXACT, epochs))
        below = "" if exact is None or method == EXACT else f"{100 * accuracy(exact) - reached:.2f}"
        cells += [f"{reached:.2f}", below]
    return cells


def _last(run: Run) -> float:
    return float(run.rows[-1]["test_accuracy"])


def _panels(found: Mapping[tuple[str, int], Run]) -> list[Panel]:
    """Return the final accuracy against the length of the schedule, and the curves of the longest schedule."""
    final = {
        method: [(epochs, 100 * _last(found[method, epochs])) for epochs in SCHEDULES if (method, epochs) in found]
        for method in METHODS
    }
    longest = max(SCHEDULES)
    curves = {
        method: [(row["epoch"], 100 * row["test_accuracy"]) for row in found[method, longest].rows]
        for method in METHODS
        if (method, longest) in found
    }
    return [
        Panel("epochs of the schedule", "test accuracy after the last epoch (%)", {m: p for m, p in final.items() if p}),
        Panel(f"epoch of the schedule of {longest}", "test accuracy (%)", curves),
    ]
