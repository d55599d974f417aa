"""Fine-tune a pre-trained language model with late gradients: ``python -m benchmarks.fine_tuning MODEL TEXT --out RECORDS``.

MODEL is a folder of a Hugging Face checkpoint, TEXT a text file: its first 80 % are for training, the next 10 % choose the learning
rates, the last 10 % are evaluated at the end of final runs. Runs with the same seed read the same tokens in the same order.
Each run is written to a file of its own, and runs that are there are not repeated. ``plain`` is a loop in PyTorch without
petra. Prints tables of all records, and with ``--picture`` draws their losses.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.records import recorded
from benchmarks.report import add_cells, best_rate, machine, show_records
from benchmarks.staleness.figures import difference
from launch.runtime.terminal import command
from petra import Numerics, Pipeline, Recipe, TensorSpec
from petra.analysis.plots import own_settings
from petra.training import Polynomial

WINDOW, WINDOWS = 128, 8
"""Tokens of a window, and windows of an update."""
STAGES = 8
UPDATES, SHORT = 80, 32
"""Updates of a final run, and of a run of the search. The rate decays to 0 within each."""
EVALUATIONS = 4
"""Evaluations of a run on the validation part, at equal distances."""
WARMUP = 0.1
RATES = (2e-5, 5e-5, 1e-4, 2e-4)
"""Peak learning rates of the search, which goes on by a factor of 2 while the best rate is at an edge."""
SEARCH_SEED, SEEDS = 100, (0, 1, 2)
VALIDATION, TEST = 64, 160
"""Windows of each part that are evaluated, at equal distances."""


@dataclass(frozen=True)
class Cell:
    """A method with its number of microbatches per update, and how it is tried.

    Attributes:
        searched: Whether it has a search of its own. If not, it takes the rate of ``plain``.
    """

    method: str
    k: int
    seeds: tuple[int, ...] = SEEDS
    searched: bool = True

    @property
    def name(self) -> str:
        """Name in the records."""
        return f"{self.method}_k{self.k}"


CELLS = (
    Cell("plain", 2),
    Cell("dsp", 8),
    Cell("dsp", 4),
    Cell("pipedream_2bw", 8, seeds=(0,)),
    Cell("1f1b", 8, seeds=(0,), searched=False),
)


class Windows:
    """Source of windows of one part of the text, in an order drawn by a seed, or in order if it is None.

    Args:
        tokens: Token numbers, of shape (number,).
        size: Windows of a microbatch.
    """

    def __init__(self, tokens: Tensor, size: int, seed: int | None = None, count: int | None = None) -> None:
        number = (len(tokens) - 1) // WINDOW
        every = number if count is None else min(count, number)
        order = torch.arange(every) * number // every
        if seed is not None:
            order = torch.randperm(number, generator=torch.Generator().manual_seed(seed))
        self.tokens, self.size, self.order = tokens, size, order

    def _rows(self, m: int, shift: int) -> Tensor:
        starts = self.order[torch.arange(m * self.size, (m + 1) * self.size) % len(self.order)] * WINDOW + shift
        return torch.stack([self.tokens[start : start + WINDOW] for start in starts.tolist()])

    def inputs(self, m: int) -> Tensor:
        """Return the windows of microbatch ``m``, of shape (size, WINDOW)."""
        return self._rows(m, 0)

    def targets(self, m: int) -> Tensor:
        """Return the next tokens, of shape (size · WINDOW,)."""
        return self._rows(m, 1).flatten()


class Plain:
    """The same training in PyTorch and transformers alone: one loop, without stages."""

    def __init__(self, model: Path, rate: Polynomial, k: int) -> None:
        from transformers import AutoModelForCausalLM

        self.network = AutoModelForCausalLM.from_pretrained(model)
        self.network.lm_head.weight = nn.Parameter(self.network.lm_head.weight.detach().clone())  # untied, as in petra
        self.optimizer = torch.optim.AdamW(self.network.parameters(), weight_decay=0.0)
        self.rate, self.k, self.done = rate, k, 0

    def _loss(self, data: Windows, m: int) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            logits = self.network(data.inputs(m), use_cache=False).logits
        return functional.cross_entropy(logits.float().flatten(0, 1), data.targets(m))

    def train(self, data: Windows, microbatches: int) -> float:
        """Train on the next microbatches, and return their mean loss."""
        self.network.train()
        losses = []
        for _ in range(microbatches):
            loss = self._loss(data, self.done)
            (loss / self.k).backward()
            losses.append(loss.item())
            self.done += 1
            if self.done % self.k == 0:
                for group in self.optimizer.param_groups:
                    group["lr"] = self.rate(self.done)
                self.optimizer.step()
                self.optimizer.zero_grad()
        return statistics.fmean(losses)

    @torch.no_grad()
    def evaluate(self, data: Windows, microbatches: int) -> float:
        """Return the mean loss of microbatches 0 to ``microbatches`` - 1."""
        self.network.eval()
        return statistics.fmean(self._loss(data, m).item() for m in range(microbatches))


class Staged:
    """The training as a pipeline of :data:`STAGES` stages, in one process: the same weights as in many."""

    def __init__(self, model: Path, rate: Polynomial, cell: Cell) -> None:
        from petra.huggingface import from_pretrained

        blocks, size = from_pretrained(model), WINDOWS // cell.k
        optimizer = partial(torch.optim.AdamW, weight_decay=0.0)
        recipe = Recipe(lambda stage: optimizer(stage.parameters()), lambda done: rate(done * CELLS[0].k // cell.k))
        self.pipeline = Pipeline(
            blocks,
            TensorSpec((size, WINDOW), torch.int64),
            recipe,
            method=cell.method,
            k=cell.k,
            stages=STAGES,
            numerics=Numerics(autocast=torch.bfloat16),
        )

    def train(self, data: Windows, microbatches: int) -> float:
        """Train on the next microbatches, and return their mean loss."""
        return self.pipeline.train(data, microbatches).loss

    def evaluate(self, data: Windows, microbatches: int) -> float:
        """Return the mean loss of microbatches 0 to ``microbatches`` - 1."""
        return self.pipeline.evaluate(data, microbatches).loss


def run(cell: Cell, rate: float, updates: int, seed: int, tokens: Tensor, options: argparse.Namespace) -> dict[str, Any]:
    """Return the record of one run, trained now unless the folder has it."""
    name = f"{cell.name}__lr{rate:g}_u{updates}_s{seed}"
    found = recorded(options.out, name, lambda: train(cell, rate, updates, seed, tokens, options.model))
    print(f"{name}: validation {found['val'][-1][1]:.4f}, test {found.get('test')}, {found['seconds']} s", flush=True)
    return found


def train(cell: Cell, rate: float, updates: int, seed: int, tokens: Tensor, model: Path) -> dict[str, Any]:
    """Train, and return the record."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    size, ends = WINDOWS // cell.k, [len(tokens) * share // 10 for share in (0, 8, 9, 10)]
    part, val, test = (tokens[start:end] for start, end in pairwise(ends))
    data, held_out = Windows(part, size, seed), Windows(val, size, count=VALIDATION)
    schedule = Polynomial(rate, updates * CELLS[0].k, 1, WARMUP, power=1.0)  # the same rate in update u for every k
    network = Plain(model, schedule, cell.k) if cell.method == "plain" else Staged(model, schedule, cell)
    begun, curve, losses = time.time(), [(0, network.evaluate(held_out, VALIDATION // size))], []
    for part_of_run in range(1, EVALUATIONS + 1):
        losses.append(network.train(data, updates // EVALUATIONS * cell.k))
        done = part_of_run * updates // EVALUATIONS
        curve.append((done * WINDOWS * WINDOW, network.evaluate(held_out, VALIDATION // size)))
    record = {"cell": cell.name, "method": cell.method, "k": cell.k, "rate": rate, "updates": updates, "seed": seed}
    if isinstance(network, Staged):
        record["staleness"] = network.pipeline.plan.stages[0].staleness
    if updates == UPDATES:
        record["test"] = network.evaluate(Windows(test, size, count=TEST), TEST // size)
    return {**record, "val": curve, "train": losses, "seconds": round(time.time() - begun), "machine": machine()}


def search(cell: Cell, tokens: Tensor, options: argparse.Namespace) -> float:
    """Return the rate that is best on the validation part."""
    return best_rate(RATES, lambda rate: run(cell, rate, SHORT, SEARCH_SEED, tokens, options)["val"][-1][1])


def table(found: Sequence[dict[str, Any]]) -> str:
    """Return a Markdown table of the final runs, and one of the search."""
    lines = ["| method | k | staleness | rate | seeds | test loss | above plain | in % |", "|---" * 8 + "|"]
    final = {cell.name: [record for record in found if record["cell"] == cell.name and "test" in record] for cell in CELLS}
    plain = {record["seed"]: record["test"] for record in final[CELLS[0].name]}
    for runs in filter(None, final.values()):
        losses = {record["seed"]: record["test"] for record in runs}
        above = None if runs[0]["method"] == "plain" else difference(losses, plain)
        mean = statistics.fmean(losses.values())
        cells = [
            runs[0]["method"],
            runs[0]["k"],
            f"{runs[0].get('staleness', 0):.2f}",
            f"{runs[0]['rate']:g}",
            len(runs),
            f"{mean:.4f}",
        ]
        if above is not None:
            percent = [100 * value / statistics.fmean(plain.values()) for value in above]
            cells += [f"{above[0]:.4f} ± {above[1]:.4f}", f"{percent[0]:.2f} ± {percent[1]:.2f}"]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    lines += ["", "| method | k | rate: validation loss after the search's runs |", "|---|---|---|"]
    for cell in CELLS:
        tried = {record["rate"]: record["val"][-1][1] for record in found if record["cell"] == cell.name and "test" not in record}
        if tried:
            lines.append(f"| {cell.method} | {cell.k} | {'; '.join(f'{rate:g}: {tried[rate]:.4f}' for rate in sorted(tried))} |")
    return "\n".join(lines)


@own_settings()
def draw(found: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw validation losses of final runs against tokens, and their differences from ``plain`` with intervals of 95 %."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    final = {cell: [record for record in found if record["cell"] == cell.name and "test" in record] for cell in CELLS}
    plain = {record["seed"]: record["val"] for record in final[CELLS[0]]}
    for cell, records in final.items():
        curves = {record["seed"]: record["val"] for record in records}
        tokens = [point[0] for curve in [*curves.values()][:1] for point in curve]
        columns = [{seed: curve[i][1] for seed, curve in curves.items()} for i in range(len(tokens))]
        label = f"{cell.method}, k = {cell.k}"
        (line,) = left.plot(tokens, [statistics.fmean(column.values()) for column in columns], marker="o", label=label)
        pairs = [difference(column, {seed: plain[seed][i][1] for seed in plain}) for i, column in enumerate(columns)]
        if cell is not CELLS[0] and None not in pairs:
            means, widths = zip(*filter(None, pairs), strict=True)
            right.errorbar(tokens, means, widths, marker="o", capsize=3, label=label, color=line.get_color())
    left.set(xlabel="tokens", ylabel="loss on the validation part")
    right.set(xlabel="tokens", ylabel="above plain, same seeds (95 % interval)")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path)


@command
def main() -> None:
    """Train what has no record, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="folder of the checkpoint")
    parser.add_argument("text", type=Path, help="text file in UTF-8")
    parser.add_argument("--out", type=Path, required=True, help="folder of the records; or a file of them, which is only read")
    add_cells(parser, (cell.name for cell in CELLS), nargs="*")  # none: show records only
    parser.add_argument("--picture", type=Path, help="file of the picture, .png or .svg")
    options = parser.parse_args()
    if options.cells:
        from transformers import AutoTokenizer

        text = options.text.read_text(encoding="utf-8")
        tokens = torch.tensor(AutoTokenizer.from_pretrained(options.model)(text)["input_ids"])
    for cell in CELLS:
        if cell.name in options.cells:
            rate = search(cell if cell.searched else CELLS[0], tokens, options)
            for seed in cell.seeds:
                run(cell, rate, UPDATES, seed, tokens, options)
    show_records(options, table, draw)


if __name__ == "__main__":
    main()
