"""Cost against work: seconds of a microbatch by depth and by batch, and memory of a reversible stage by its depth and by J.

python -m benchmarks.scaling --out runs/scaling.json

Times are of PETRA in one process, while the line is full. Memory is of the second stage, which is reversible, in a process
of its own: bytes held between F and B at most, and what building and training it adds to the process's resident memory (Linux),
weights, gradients and momentum aside; with graphs kept it grows, which shows that the measure can tell.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.report import alternate, machine, peak_mib, save, spread, table
from benchmarks.two_stages import Noise, build, period, sgd
from petra import METHODS, Keep, Method, Pipeline
from petra.analysis.memory import measured
from petra.settings import Numerics

KEEPS = {"nothing": METHODS["petra"], "graphs": Method("petra", delay=2, keep=Keep.GRAPH)}
COPIES = 3  # of the parameters: weights, gradients, momentum


def pipeline(stages: Sequence[int], method: Method, options: argparse.Namespace, batch: int) -> tuple[Pipeline, Noise]:
    """Of ``stages`` reversible blocks in each stage, an even number in all."""
    network = argparse.Namespace(blocks=sum(stages) // 2, channels=options.channels, size=options.size, batch=batch)
    model, inputs, _ = build(network)
    counts = list(stages)
    counts[0] += 1
    counts[-1] += 1
    return Pipeline(model, inputs, method=method, stages=counts, optimizer=sgd, numerics=Numerics(channels_last=True)), Noise(
        inputs
    )


def seconds(works: dict[int, tuple[int, int]], options: argparse.Namespace) -> dict[int, list[float]]:
    """Of a microbatch, for each amount of work its depth and batch."""
    contestants = {}
    for work, (depth, batch) in works.items():
        made, stream = pipeline([depth // 2, depth // 2], METHODS["petra"], options, batch)
        contestants[str(work)] = partial(period, made, stream, options.microbatches + made.plan.delays[0] + 1)
    return {int(work): times for work, times in alternate(contestants, options.rounds).items()}


def linearity(found: dict[int, list[float]]) -> dict[str, float]:
    """Of the medians: the part of their variance that a line explains, and the time of a unit of work, the last over the first."""
    works, medians = list(found), [statistics.median(times) for times in found.values()]
    return {
        "r_squared": statistics.correlation(works, medians) ** 2,
        "last_over_first_for_a_unit": medians[-1] / works[-1] / (medians[0] / works[0]),
    }


def memory(stages: Sequence[int], keep: str, options: argparse.Namespace) -> dict[str, float]:
    """MiB of the second of as many processes as stages."""
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_stage, (folder, list(stages), keep, options), nprocs=len(stages))
        return json.loads((Path(folder) / "figures.json").read_text())  # type: ignore[no-any-return]


def _stage(rank: int, folder: str, stages: list[int], keep: str, options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=len(stages))
    found = stage_memory(rank, stages, keep, options)
    if rank == 1:
        (Path(folder) / "figures.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def stage_memory(rank: int, stages: Sequence[int], keep: str, options: argparse.Namespace) -> dict[str, float]:
    """MiB of this process's stage: held between F and B at most, and added to the process at its peak."""
    small = argparse.Namespace(channels=4, size=4)
    made, stream = pipeline([2] * len(stages), KEEPS[keep], small, 2)
    made.train(stream, 2)  # what comes with the first run in a process isn't this stage's
    held = parameters = 0

    def work() -> None:
        nonlocal held, parameters
        made, stream = pipeline(stages, KEEPS[keep], options, options.batch)
        (held,) = measured(made, stream, 2 * made.plan.delays[0] + 2)
        parameters = sum(p.nbytes for p in made.stages[rank].module.parameters())

    resident = peak_mib(work)
    return {"held": held / 2**20, "resident": resident - COPIES * parameters / 2**20}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--depths", type=_numbers, default="8,16,32,64", help="numbers of blocks, even ones")
    parser.add_argument("--batches", type=_numbers, default="4,8,16,32,64", help="sizes of a microbatch")
    parser.add_argument("--lines", type=_numbers, default="3,5,8", help="numbers of stages J, 3 or more, for memory")
    parser.add_argument("--blocks", type=int, default=8, help="reversible blocks where depth does not vary")
    parser.add_argument("--channels", type=int, default=32)
    parser.add_argument("--size", type=int, default=16, help="pixels of a side")
    parser.add_argument("--batch", type=int, default=16, help="images of a microbatch where that does not vary")
    parser.add_argument("--microbatches", type=int, default=4, help="of one round")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", help="JSON file to write")
    options = parser.parse_args()
    for key in ("depths", "batches"):
        if len(set(getattr(options, key))) < 2:
            parser.error(f"--{key}: found one number, accepted are two or more, since a line is laid through them")
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
        print(f"\nR^2 of a line {line['r_squared']:.4f}; time for one of the {what}, last row over first: ", end="")
        print(f"{line['last_over_first_for_a_unit']:.3f}")

    for what, lines in (
        ("blocks in the stage, J = 3", {depth: [1, depth, 1] for depth in options.depths}),
        (f"stages J, {options.blocks} blocks each", {J: [options.blocks] * J for J in options.lines}),
    ):
        print(f"\n| {what} | " + " | ".join(f"{keep} kept: {kind} MiB" for keep in KEEPS for kind in ("held", "resident")) + " |")
        print("|---" * (2 * len(KEEPS) + 1) + "|")
        for work, stages in lines.items():
            row = {keep: memory(stages, keep, options) for keep in KEEPS}
            figures.setdefault(what, {})[work] = row
            print(
                f"| {work} | " + " | ".join(f"{value:.1f}" for cells in row.values() for value in cells.values()) + " |", flush=True
            )
    save(options.out, {"machine": machine(), "options": vars(options), **figures})


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


if __name__ == "__main__":
    main()
