"""Make the table that ``petra plan`` and ``petra train`` quote: ``python -m benchmarks.expected > launch/run/expected.csv``.

Rows without ``keep`` are exact gradients. Losses are bits per byte (text), percent of wrong answers (images) and nats per token
(fine-tuning), means over seeds; ``above`` is the mean difference of runs with the same seed, in percent of the exact loss or in
points, ``half`` half of its 95 % interval. ``updates`` are those after which the training loss is, for the first time, one that
all rows of the task reach.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchmarks import fine_tuning, vision
from benchmarks.records import RECORDS
from benchmarks.staleness import costs, law
from benchmarks.staleness.cells import CELLS
from benchmarks.staleness.figures import difference, final, final_runs, read_all
from launch.run.expected import FILTERS, REMEDIES
from launch.run.folder import records_in
from petra import METHODS, Method
from petra.method import Keep
from petra.training import OPTIMIZERS

HEADER = "task,keep,weights,optimizer,remedy,staleness,above,half,loss,updates"
REMEDY = {preset: name for name, preset in REMEDIES.items()}
"""Names of remedies in a configuration by their presets, which cells also use."""


@dataclass(frozen=True)
class Row:
    """A setting. ``method`` is None for exact gradients."""

    task: str
    method: Method | None
    optimizer: str
    remedy: str
    staleness: float
    above: float
    half: float
    loss: float
    curve: Sequence[float]

    def text(self, updates: float) -> str:
        """Return the row, with the updates until the common loss."""
        keep, weights = ("", "") if self.method is None else (str(self.method.keep), self.method.weights.value)
        numbers = (self.staleness, self.above, self.half, self.loss)
        cells = [self.task, keep, weights, self.optimizer, self.remedy, *(f"{number:.4g}" for number in numbers), f"{updates:g}"]
        return ",".join(cells)


def text_rows() -> Iterator[Row]:
    """Yield the settings of 16 stages that were trained on text with several seeds, and backpropagation with their optimizers."""
    records = read_all(RECORDS / "staleness.jsonl")
    cells = {cell.name: cell for cell in CELLS}
    found = {each.cell: each for each in law.penalties(records) if cells[each.cell].delay is None or cells[each.cell].keep}
    found = {name: each for name, each in found.items() if cells[name].stages == 16 and cells[name].remedy != "fitted"}
    exact = {f"j16_backprop_k8_{cells[name].optimizer}": None for name in found}
    for name in (*exact, *found):
        cell, runs = cells[name], final_runs(records[name])
        curve = smooth([run["curve"] for run in runs])
        loss = statistics.fmean(final(runs).values())
        if name in exact:
            yield Row("text", None, cell.optimizer, "none", 0, 0, 0, loss, curve)
            continue
        method, staleness, each = cell.make_method(), runs[0]["staleness"], found[name]
        remedy = remedy_of(cell.remedy, cell.optimizer)
        yield Row("text", method, cell.optimizer, remedy, staleness, each.percent, each.half, loss, curve)


def remedy_of(name: str, optimizer: str) -> str:
    """Return the name of a cell's remedy in a configuration."""
    return REMEDY["prediction_difference" if (name, optimizer) == ("prediction", "muon") else name]


def image_rows() -> Iterator[Row]:
    """Yield the methods and optimizers with several seeds on CIFAR-10. ``reversible`` and ``backprop`` have the same gradients."""
    runs = vision.grouped([*records_in(RECORDS / "vision.jsonl").values()], final=True)
    wrong = {key: {row["seed"]: 100 * (1 - row["test"]) for row in rows} for key, rows in runs.items()}
    for key, rows in runs.items():
        own, (method, optimizer, network, remedy) = wrong[key], key
        pairs = difference(own, wrong.get(key._replace(method="backprop", remedy="none"), {}))
        known = optimizer in OPTIMIZERS and network == "revnet18" and remedy != "fitted"
        if pairs is None or method == "reversible" or not known:
            continue
        curve = [statistics.fmean(each) for each in zip(*(row["train_loss"] for row in rows), strict=True)]
        of_updates = [loss for loss in curve for _ in range(rows[0]["updates"] // len(curve))]
        late, loss = None if method == "backprop" else vision.METHOD[method], statistics.fmean(own.values())
        filters = FILTERS * (optimizer == "muon")
        yield Row("images", late, optimizer + filters, remedy_of(remedy, optimizer), rows[0]["staleness"], *pairs, loss, of_updates)


def fine_tuning_rows() -> Iterator[Row]:
    """Yield the methods with several seeds that fine-tune."""
    finished = [row for row in records_in(RECORDS / "fine_tuning.jsonl").values() if "test" in row]
    plain = {row["seed"]: row["test"] for row in finished if row["method"] == "plain"}
    for cell in fine_tuning.CELLS:
        rows = [row for row in finished if row["cell"] == cell.name]
        losses = {row["seed"]: row["test"] for row in rows}
        pairs, mean = difference(losses, plain), statistics.fmean(losses.values())
        if pairs is not None:
            percent = [100 * value / statistics.fmean(plain.values()) for value in pairs]
            own = None if cell.method == "plain" else METHODS[cell.method]
            yield Row("fine-tuning", own, "adamw", "none", rows[0].get("staleness", 0), percent[0], percent[1], mean, ())


def smooth(curves: Sequence[Sequence[float]]) -> list[float]:
    """Return the mean of curves of the training loss over the seeds, then over successive updates."""
    means = [statistics.fmean(each) for each in zip(*curves, strict=True)]
    return [statistics.fmean(means[max(0, i - costs.SMOOTH + 1) : i + 1]) for i in range(len(means))]


def lines(rows: Sequence[Row]) -> Iterator[str]:
    """Yield the rows of one task."""
    known = [row.curve for row in rows if row.curve]
    common = max(min(curve[costs.SMOOTH - 1 :]) for curve in known) if known else 0.0
    for row in rows:
        yield row.text(costs.updates_until(row.curve, common) if row.curve else 0)


def table() -> str:
    """Return the whole file."""
    tasks = [[*rows()] for rows in (text_rows, image_rows, fine_tuning_rows)]
    return "\n".join([HEADER, *(line for rows in tasks for line in lines(rows))]) + "\n"


def markdown(rows: Sequence[Row]) -> str:
    """Return a Markdown table of what PETRA without a remedy, or with error feedback, lost on text, by optimizer and staleness."""
    found = {
        ((row.optimizer, row.remedy, row.method.keep), row.staleness): row
        for row in rows
        if row.method is not None and row.method.name == "petra" and row.remedy in ("none", "feedback=1.0")
    }
    columns = sorted({staleness for _, staleness in found})
    lines = ["| above exact gradients, % | " + " | ".join(f"{staleness:.2f} updates" for staleness in columns) + " |"]
    lines.append("|---" * (len(columns) + 1) + "|")
    for setting in dict.fromkeys(setting for setting, _ in found):
        cells = [found.get((setting, staleness)) for staleness in columns]
        optimizer, remedy, keep = setting
        words = optimizer + (", error feedback" if remedy != "none" else "") + (", stored graphs" if keep == Keep.GRAPH else "")
        lines.append(f"| {words} | {' | '.join('' if row is None else f'{row.above:.1f} ± {row.half:.1f}' for row in cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table(), end="")
