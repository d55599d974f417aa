"""Measure how time grows with depth and batch size, and how the memory of a stage grows with its depth and with J.

python -m benchmarks.scaling --out runs/scaling.json

Times are those of PETRA in one process while the pipeline is full. Memory is that of the second stage, which is reversible and has
its own process: the largest number of bytes stored between forward and backward, and the resident memory (Linux) that building and
training the stage adds to the process, without weights, gradients and momentum. With keep=graph both grow with depth, which shows
that the measurement detects growth.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from benchmarks.report import alternate, benchmark_parser, in_processes, numbers, peak_mib, save, spread, table
from benchmarks.two_stages import Noise, build, sgd
from launch.bench.contestants import period
from petra import METHODS, Keep, Method, Pipeline, Recipe
from petra.settings import Numerics
from reproduction.stored_memory import measured

KEEPS = {"nothing": METHODS["petra"], "graphs": Method("petra", delay=2, keep=Keep.GRAPH)}
COPIES = 3
"""Copies of the parameters: weights, gradients, momentum."""


def pipeline(stages: Sequence[int], method: Method, options: argparse.Namespace, batch: int) -> tuple[Pipeline, Noise]:
    """Return a pipeline with the given number of reversible blocks in each stage, and its data. The total must be even."""
    network = argparse.Namespace(blocks=sum(stages) // 2, channels=options.channels, size=options.size, batch=batch)
    model, inputs, _ = build(network)
    counts = list(stages)
    counts[0] += 1
    counts[-1] += 1
    return Pipeline(model, inputs, Recipe(sgd), method=method, stages=counts, numerics=Numerics(channels_last=True)), Noise(inputs)


def seconds(works: dict[int, tuple[int, int]], options: argparse.Namespace) -> dict[int, list[float]]:
    """Return the seconds per microbatch in each round, by amount of work.

    Args:
        works: Depth and batch size for each amount of work.
    """
    contestants = {}
    for work, (depth, batch) in works.items():
        made, data = pipeline([depth // 2, depth // 2], METHODS["petra"], options, batch)
        contestants[str(work)] = partial(period, made, data, options.microbatches + made.plan.delays[0] + 1)
    return {int(work): times for work, times in alternate(contestants, options.rounds).items()}


def linearity(found: dict[int, list[float]]) -> dict[str, float]:
    """Fit a line through the medians.

    Returns:
        R² of the line, and the time per unit of work at the last amount of work divided by that at the first.
    """
    works, medians = list(found), [statistics.median(times) for times in found.values()]
    return {
        "r_squared": statistics.correlation(works, medians) ** 2,
        "last_over_first_for_a_unit": medians[-1] / works[-1] / (medians[0] / works[0]),
    }


def stage_memory(rank: int, stages: Sequence[int], keep: str, options: argparse.Namespace) -> dict[str, float]:
    """Return the memory of this process's stage in MiB.

    Returns:
        ``stored``: Largest size of what is stored between forward and backward. ``resident``: Peak resident memory that the stage
        adds to the process, without parameters, gradients and momentum.
    """
    small = argparse.Namespace(channels=4, size=4)
    made, data = pipeline([2] * len(stages), KEEPS[keep], small, 2)
    made.train(data, 2)  # exclude memory that the first run in a process allocates
    stored = parameters = 0

    def work() -> None:
        nonlocal stored, parameters
        made, data = pipeline(stages, KEEPS[keep], options, options.batch)
        (stored,) = measured(made, data, 2 * made.plan.delays[0] + 2)
        parameters = sum(p.nbytes for p in made.stages[rank].module.parameters())

    resident = peak_mib(work)
    return {"stored": stored / 2**20, "resident": resident - COPIES * parameters / 2**20}


def main() -> None:
    parser = benchmark_parser(__doc__, 9, images=(32, 16, 16))
    parser.add_argument("--depths", type=numbers, default="8,16,32,64", help="numbers of blocks, which must be even")
    parser.add_argument("--batches", type=numbers, default="4,8,16,32,64", help="batch sizes")
    parser.add_argument("--lines", type=numbers, default="3,5,8", help="numbers of stages J for memory, each 3 or more")
    parser.add_argument("--blocks", type=int, default=8, help="reversible blocks where the depth is fixed")
    parser.add_argument("--microbatches", type=int, default=4, help="microbatches of one round")
    options = parser.parse_args()
    for key in ("depths", "batches"):
        if len(set(getattr(options, key))) < 2:
            parser.error(f"--{key}: expected at least two different numbers, to fit a line, got {getattr(options, key)}")
    torch.set_num_threads(1)
    print(f"{options.channels} channels, {options.size} pixels, one thread")

    figures: dict[str, Any] = {}
    for what, works in (
        ("blocks", {depth: (depth, options.batch) for depth in options.depths}),
        ("images", {batch: (options.blocks, batch) for batch in options.batches}),
    ):
        found = seconds(works, options)
        figures[what] = {"seconds": found, **linearity(found)}
        print("\n" + table({f"{work} {what}": spread(times) for work, times in found.items()}, "s per microbatch"))
        line = figures[what]
        print(f"\nR² of a line: {line['r_squared']:.4f}; time per unit of {what}, last row divided by first: ", end="")
        print(f"{line['last_over_first_for_a_unit']:.3f}")

    for what, pipelines in (
        ("blocks in the stage, J = 3", {depth: [1, depth, 1] for depth in options.depths}),
        (f"stages J, {options.blocks} blocks each", {J: [options.blocks] * J for J in options.lines}),
    ):
        print(f"\n| {what} | " + " | ".join(f"{keep} kept: {kind} MiB" for keep in KEEPS for kind in ("stored", "resident")) + " |")
        print("|---" * (2 * len(KEEPS) + 1) + "|")
        for work, stages in pipelines.items():
            row = {keep: in_processes(len(stages), stage_memory, stages, keep, options)[1] for keep in KEEPS}
            figures.setdefault(what, {})[work] = row
            print(
                f"| {work} | " + " | ".join(f"{value:.1f}" for cells in row.values() for value in cells.values()) + " |", flush=True
            )
    save(options, figures)


if __name__ == "__main__":
    main()
