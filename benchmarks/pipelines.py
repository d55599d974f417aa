"""Compare PETRA with other pipelines on the same two stages, for different numbers of microbatches per update.

python -m benchmarks.pipelines --out runs/pipelines.json

Two gloo processes with one thread each have a balanced stage of the same RevNet. Before the measurement every contestant makes one
update from the same weights, which must equal the update of plain autograd. Afterwards the same methods are simulated for 2, 10 and
18 such stages, with block costs measured in both processes at the same time. Libraries that aren't installed are listed and skipped
(``pip install --no-deps deepspeed torchgpipe``; deepspeed also needs einops, hjson, msgpack, ninja, psutil and py-cpuinfo).
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.pipeline_peers import checkpointed, deepspeed, torchgpipe
from benchmarks.report import benchmark_parser, in_processes, installed, numbers, ratio, save
from benchmarks.two_stages import build, sgd
from launch.bench.contestants import Batches, Contestant, Peer, Setting, petra, torch_schedule
from petra import METHODS, Keep, Method, Numerics, make_plan
from petra.cost_model.costs import StageCost, pipeline_costs, profile_blocks
from petra.cost_model.event_graph import ZB_H1
from petra.cost_model.machines import Link, measure_link
from petra.cost_model.simulator import predict

NOTHING, GRAPH = METHODS["petra"], Method("petra", delay=2, keep=Keep.GRAPH)
CONTESTANTS: dict[str, Peer] = {
    "PETRA, nothing kept": petra(NOTHING, "lockstep"),
    "PETRA, graphs kept": petra(GRAPH, "lockstep"),
    "PETRA, graphs kept, d = 1": petra(replace(GRAPH, delay=1), "edge"),
    "PETRA, nothing kept, d = 1": petra(replace(NOTHING, delay=1), "edge"),
    "petra's 1F1B": petra(METHODS["1f1b"], "edge"),
    "torch 1F1B": torch_schedule("Schedule1F1B"),
    "torch GPipe": torch_schedule("ScheduleGPipe"),
    "torch zero bubble": torch_schedule("ScheduleInterleavedZeroBubble"),
    "DeepSpeed": deepspeed,
    "torchgpipe": torchgpipe,
    "torch.utils.checkpoint": checkpointed,
}
SIMULATED = {
    "PETRA, nothing kept": NOTHING,
    "PETRA, graphs kept": GRAPH,
    "1F1B": METHODS["1f1b"],
    "ZB-H1": ZB_H1,
    "GPipe": METHODS["gpipe"],
}
RIVAL = "torch 1F1B"


def plain_update(setting: Setting, batches: Batches) -> tuple[list[Tensor], list[Tensor]]:
    """Return the weights of every block before and after one update of the whole network by plain autograd."""
    network = setting.plan.model.build(0).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    before, optimizer = [_weights(block) for block in network.children()], sgd(network)
    for m in range(setting.plan.k):
        (F.cross_entropy(network(batches.inputs(m)), batches.targets(m)) / setting.plan.k).backward()
    optimizer.step()
    return before, [_weights(block) for block in network.children()]


def require_plain_update(name: str, run: Contestant, before: Sequence[Tensor], after: Sequence[Tensor]) -> None:
    """Make the contestant's first update, and compare it with plain autograd's.

    Raises:
        AssertionError: If the update of a block of this process differs.
    """
    run.train(1)
    for b, block in run.blocks.items():
        error = (_weights(block) - after[b]).norm() / (after[b] - before[b]).norm().clamp(min=1e-12)
        assert error < 0.01, f"{name}: the update of block {b} differs from plain autograd's by {error:.3g} of its norm"


def _weights(block: nn.Module) -> Tensor:
    return torch.cat([torch.zeros(1), *(p.detach().flatten() for p in block.parameters())])


def measure(rank: int, options: argparse.Namespace) -> dict[str, Any]:
    """Return the periods of all contestants for each k, and the costs of the blocks, in one of the two processes."""
    model, inputs, stages = build(options)
    figures: dict[str, dict[str, list[float]]] = {}
    missing: list[str] = []
    for k in options.k:
        plan = make_plan(model, inputs, k=k, stages=stages, processes=2, numerics=Numerics(channels_last=True))
        setting, batches = Setting(plan, rank, sgd, threads=options.threads), Batches(inputs, k)
        runs, missing = installed({name: partial(make, setting, batches) for name, make in CONTESTANTS.items()})
        before, after = plain_update(setting, batches)
        for name, run in runs.items():
            require_plain_update(name, run, before, after)
        updates = max(1, options.microbatches // k)
        rows = [{name: run.train(updates) for name, run in runs.items()} for _ in range(options.rounds + 1)][1:]
        figures[str(k)] = {name: [row[name] for row in rows] for name in runs}
        if rank == 0:
            medians = {name: statistics.median(values) for name, values in figures[str(k)].items()}
            print(f"k = {k}: " + ", ".join(f"{name} {1000 * value:.1f}" for name, value in medians.items()), flush=True)
    costs = {keep.value: _cost(keep, options, model, inputs).__dict__ for keep in (Keep.NOTHING, Keep.GRAPH)}
    return {"periods": figures, "not_installed": missing, "costs": costs, "link": measure_link().__dict__}


def _cost(keep: Keep, options: argparse.Namespace, model: Any, inputs: Any) -> StageCost:
    """Measure the cost of a stage of couplings, in both processes at the same time."""
    dist.barrier()
    couplings = profile_blocks(model, inputs, optimizer=sgd, numerics=Numerics(channels_last=True), rounds=options.rounds)[1:-1]
    return pipeline_costs([couplings[: options.blocks]] * 2, [[keep] * options.blocks] * 2)[1]


def simulated(costs: dict[str, Any], link: dict[str, float], stages: int, k: int) -> dict[str, float]:
    """Return the simulated seconds per microbatch of each method with this number of equal stages."""
    return {
        name: predict([StageCost(**costs[str(method.keep)])] * stages, method, k, link=Link(**link)).period
        for name, method in SIMULATED.items()
    }


def main() -> None:
    parser = benchmark_parser(__doc__, 7, images=(64, 8, 16))
    parser.add_argument("--k", type=numbers, default="1,2,3,4,8,16,32", help="numbers of microbatches per update")
    parser.add_argument("--blocks", type=int, default=4, help="reversible blocks per stage, 2 or more")
    parser.add_argument("--microbatches", type=int, default=12, help="microbatches of one round of one contestant, but at least k")
    parser.add_argument("--threads", type=int, default=2, help="threads of contestants that run in one process only")
    options = parser.parse_args()

    found = in_processes(2, measure, options)[0]
    periods, names = found["periods"], list(found["periods"][str(options.k[0])])
    print(f"\nTwo stages of {options.blocks} blocks, {options.channels} channels, {options.size} pixels, batch {options.batch}")
    print("".join(f"\n{name}: not installed" for name in found["not_installed"]))
    print("Median milliseconds per microbatch\n\n| k | " + " | ".join(names) + " |\n" + "|---" * (len(names) + 1) + "|")
    for k, row in periods.items():
        print(f"| {k} | " + " | ".join(f"{1000 * statistics.median(values):.1f}" for values in row.values()) + " |")
    faster = {k: {n: ratio(row[RIVAL], row[n]) for n in names if n != RIVAL} for k, row in periods.items()}
    others = [name for name in names if name != RIVAL]
    print(f"\nSpeed-up over {RIVAL}, round by round: median (min - max)\n")
    print("| k | " + " | ".join(others) + " |\n" + "|---" * (len(others) + 1) + "|")
    for k, row in faster.items():
        cells = (f"{r['median']:.2f} ({r['min']:.2f} - {r['max']:.2f})" for r in row.values())
        print(f"| {k} | " + " | ".join(cells) + " |")
    simulations: dict[str, dict[str, float]] = {}
    print("\nSimulated milliseconds per microbatch, equal stages\n\n| stages | k | " + " | ".join(SIMULATED) + " |")
    print("|---" * (len(SIMULATED) + 2) + "|")
    for stages in (2, 10, 18):
        for k in options.k:
            row = simulations[f"stages={stages}, k={k}"] = simulated(found["costs"], found["link"], stages, k)
            print(f"| {stages} | {k} | " + " | ".join(f"{1000 * value:.1f}" for value in row.values()) + " |")
    save(options, {**found, "times_faster": faster, "simulated": simulations})


if __name__ == "__main__":
    main()
