"""Compare the simulator's prediction with the measured time of runs in two processes.

python -m benchmarks.simulator_check --out runs/simulator_check.json

Each round measures the link, then runs each method and records the mean time of forward, backward and update of each stage. The
simulator gets only these times, the link and the schedule. Because both sides come from the same run, a temporary slowdown of
the machine affects both.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist

from benchmarks.report import benchmark_parser, in_processes, machine, ratio, save, spread, table
from benchmarks.two_stages import Head, Noise, Split, coupling, make_pipeline
from petra import BlockSpec, Keep, Method, Model, Pipeline, TensorSpec
from petra.cost_model.costs import StageCost
from petra.cost_model.machines import Link, measure_link
from petra.cost_model.simulator import simulate
from petra.diagnostics.events import Interval, Kind
from petra.diagnostics.recorder import Recorder
from petra.settings import TransportName

METHODS: dict[str, tuple[Method, TransportName]] = {
    "petra, d = 2, lockstep": (Method("petra", 2, Keep.NOTHING), "lockstep"),
    "petra, d = 2, edge": (Method("petra", 2, Keep.NOTHING), "edge"),
    "petra, d = 1, edge": (Method("petra", 1, Keep.NOTHING), "edge"),
    "reversible, d = 0, edge": (Method("reversible", 0, Keep.NOTHING), "edge"),
    "1f1b, edge": (Method("1f1b", 1, Keep.GRAPH, flush=True), "edge"),
    "gpipe, edge": (Method("gpipe", 0, Keep.GRAPH, flush=True, fill=True), "edge"),
}


def compare(rank: int, options: argparse.Namespace) -> dict[str, dict[str, list[float]]]:
    """Return the measured and predicted seconds of each method in every round."""
    counts = [int(n) for n in options.blocks.split(",")]
    block = partial(coupling, options.channels)
    reversible = [BlockSpec(f"block{i}", block) for i in range(sum(counts))]
    model = Model("two", (BlockSpec("split", Split), *reversible, BlockSpec("head", partial(Head, options.channels))))
    inputs = TensorSpec((options.batch, 2 * options.channels, options.size, options.size), torch.float32)
    stages, data = [counts[0] + 1, counts[1] + 1], Noise(inputs)
    make = partial(make_pipeline, model, inputs, stages, options.k)
    pipelines = {name: make(method, transport) for name, (method, transport) in METHODS.items()}
    figures: dict[str, dict[str, list[float]]] = {name: {"measured": [], "predicted": []} for name in METHODS}
    for round_ in range(options.rounds + 1):
        for name, pipeline in pipelines.items():
            link = measure_link()
            dist.barrier()
            with pipeline.hooks.attached(Recorder(pipeline)) as recorder:
                start = time.perf_counter()
                pipeline.train(data, options.microbatches)
                seconds = time.perf_counter() - start
            costs: list[StageCost | None] = [None, None]
            dist.all_gather_object(costs, recorded_cost(recorder.intervals, rank, pipeline))
            method, transport = METHODS[name]
            if round_ > 0:
                figures[name]["measured"].append(seconds)
                figures[name]["predicted"].append(simulated_seconds(costs, method, transport, link, options))  # type: ignore[arg-type]
    return figures


def recorded_cost(intervals: Sequence[Interval], stage: int, pipeline: Pipeline) -> StageCost:
    """Return the mean cost of this process's stage in one run."""

    def mean(*kinds: Kind) -> float:
        """Return the total seconds of all kinds, divided by the number of intervals of the first kind."""
        seconds = [i.stop - i.start for i in intervals if i.kind in kinds]
        count = sum(i.kind is kinds[0] for i in intervals)
        return sum(seconds) / max(count, 1)

    (boundary,) = pipeline.plan.boundaries
    return StageCost(
        forward=mean(Kind.FORWARD, Kind.LOSS),
        backward=mean(Kind.BACKWARD),
        update=mean(Kind.UPDATE),
        forward_bytes=boundary.forward_bytes if stage == 0 else 0,
        backward_bytes=boundary.backward_bytes if stage == 1 else 0,
    )


def simulated_seconds(
    costs: Sequence[StageCost], method: Method, transport: TransportName, link: Link, options: argparse.Namespace
) -> float:
    """Return the simulated seconds of one run, from its start until the pipeline has drained."""
    intervals = simulate(costs, method, options.k, options.microbatches, link=link, transport=transport)  # type: ignore[arg-type]
    return max(i.stop for i in intervals)


def main() -> None:
    parser = benchmark_parser(__doc__, 9, "runs of each method")
    parser.add_argument("--blocks", default="8,5", help="number of reversible blocks in each stage")
    parser.add_argument("--channels", type=int, default=64, help="channels of each stream")
    parser.add_argument("--size", type=int, default=8, help="side of an image in pixels")
    parser.add_argument("--batch", type=int, default=16, help="images per microbatch")
    parser.add_argument("--k", type=int, default=4, help="microbatches per update")
    parser.add_argument("--microbatches", type=int, default=16, help="microbatches of each run")
    options = parser.parse_args()
    figures = in_processes(2, compare, options)[0]
    rows = {f"{name}: {kind}": spread(values) for name, pair in figures.items() for kind, values in pair.items()}
    errors = {name: ratio(pair["predicted"], pair["measured"]) for name, pair in figures.items()}
    print(f"Two stages of {options.blocks} blocks, {options.microbatches} microbatches, k = {options.k}\n")
    print(table(rows, "s") + "\n\nPredicted over measured seconds of each round (accepted: 0.9 to 1.1):\n\n" + table(errors, ""))
    save(options.out, {"machine": machine(), "options": vars(options), "figures": figures, "predicted_over_measured": errors})


if __name__ == "__main__":
    main()
