"""Compare what ``petra plan`` predicts with measured runs, in one process and in two.

python -m benchmarks.plan_check --out runs/plan_check.json

In each round, the costs of the blocks and the link are measured as ``petra plan --measure`` and ``method.delay=auto`` do, but in
both processes at the same time, because they share caches and memory in the runs too. From these figures alone, the planner chooses
the partition of each case and predicts its period. Then the same partition is trained and timed while the pipeline is full.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from statistics import mean

import torch
import torch.distributed as dist

from benchmarks.report import benchmark_parser, in_processes, ratio, save, spread, table
from benchmarks.two_stages import Noise, sgd
from launch.bench.contestants import period
from launch.plan import Candidate, predict_method
from petra import METHODS, Keep, Method, Numerics, Pipeline, Recipe, Runtime, TensorSpec
from petra.cost_model.costs import BlockCost, profile_blocks
from petra.cost_model.machines import Machines, measure_link
from petra.diagnostics.process_memory import keep_freed_memory
from petra.distributed import all_gather_objects
from petra.model import Model
from petra.models import MODELS
from petra.settings import TransportName

PETRA = METHODS["petra"]
CASES: dict[str, tuple[Method, TransportName]] = {
    "petra, d = 2, lockstep": (PETRA, "lockstep"),
    "petra, d = 2, edge": (PETRA, "edge"),
    "petra, d = 1, edge": (replace(PETRA, delay=1), "edge"),
    "graphs, d = 1, edge": (replace(PETRA, delay=1, keep=Keep.GRAPH), "edge"),
    "1f1b": (METHODS["1f1b"], "edge"),
    "gpipe": (METHODS["gpipe"], "edge"),
    "reversible": (METHODS["reversible"], "edge"),
}
ALONE = ("petra, d = 2, edge", "1f1b")
"""Cases that also run in one process."""
Figures = dict[str, dict[str, list[float]]]


def compare(rank: int, options: argparse.Namespace) -> Figures:
    """Return the predicted and the measured seconds per microbatch of each case in every round. Every process must call this."""
    keep_freed_memory()
    model, inputs = MODELS[options.model](10, width=options.width), TensorSpec((options.batch, 3, 32, 32), torch.float32)
    processes = dist.get_world_size() if dist.is_initialized() else 1
    cases = CASES if processes > 1 else {name: CASES[name] for name in ALONE}
    figures: Figures = {name: {"predicted": [], "measured": []} for name in cases}
    for round_ in range(options.rounds + 1):
        link, blocks = measure_link(), measured_blocks(model, inputs)
        for name, (method, transport) in cases.items():
            row = predict_method(blocks, method, options.k, Machines.equal(processes, link), transport)
            measured = _run(model, inputs, row, transport if processes > 1 else "local", options)
            if round_ > 0:
                figures[name]["predicted"].append(row.prediction.period)
                figures[name]["measured"].append(measured)
    return figures


def _run(model: Model, inputs: TensorSpec, row: Candidate, transport: TransportName, options: argparse.Namespace) -> float:
    """Train the partition of ``row`` and return the seconds per microbatch of the slower process."""
    pipeline = Pipeline(
        model,
        inputs,
        Recipe(sgd),
        method=row.method,
        stages=list(row.tuned.stages),
        k=options.k,
        numerics=Numerics(channels_last=True),
        runtime=Runtime(transport=transport),
    )
    data, warm_up = Noise(inputs), options.k
    pipeline.train(data, warm_up)
    return max(all_gather_objects(period(pipeline, data, options.microbatches + pipeline.plan.delays[0])))


def measured_blocks(model: Model, inputs: TensorSpec, rounds: int = 5) -> list[BlockCost]:
    """Measure the blocks in all processes at the same time, and return the mean of the processes."""
    if dist.is_initialized():
        dist.barrier()
    found = all_gather_objects(profile_blocks(model, inputs, optimizer=sgd, numerics=Numerics(channels_last=True), rounds=rounds))
    names = ("forward", "backward", "graph_forward", "graph_backward", "update", "weights")
    columns = zip(*found, strict=True)
    return [replace(column[0], **{name: mean(getattr(block, name) for block in column) for name in names}) for column in columns]


def main() -> None:
    parser = benchmark_parser(__doc__, 3, "predictions and runs of each case")
    parser.add_argument("--model", default="revnet18", choices=MODELS, metavar="NAME", help="name of a model")
    parser.add_argument("--width", type=float, default=0.5, help="factor of the number of channels")
    parser.add_argument("--batch", type=int, default=16, help="images per microbatch")
    parser.add_argument("--k", type=int, default=4, help="microbatches per update")
    parser.add_argument("--microbatches", type=int, default=13, help="microbatches of each timed run")
    options = parser.parse_args()
    figures: Figures = {}
    for processes in (1, 2):
        found = in_processes(processes, compare, options)[0]
        figures |= {f"{name}, {processes} process(es)": pair for name, pair in found.items()}
    rows = {f"{name}: {kind}": spread(values) for name, pair in figures.items() for kind, values in pair.items()}
    errors = {name: ratio(pair["predicted"], pair["measured"]) for name, pair in figures.items()}
    print(f"{options.model}, width {options.width}, batch {options.batch}, k = {options.k}\n")
    print(table(rows, "s per microbatch"))
    print("\nPredicted over measured period of each round (accepted median: 0.9 to 1.1):\n\n" + table(errors, ""))
    save(options, {"figures": figures, "predicted_over_measured": errors})


if __name__ == "__main__":
    main()
