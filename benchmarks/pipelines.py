"""Compare PETRA with other pipelines on the same two stages, for different numbers of microbatches per update.

python -m benchmarks.pipelines --out runs/pipelines.json
python -m benchmarks.pipelines --by-hand --k 4 --only "PETRA, keep" "d = " "torch 1F1B"

Two gloo processes with one thread each have a balanced stage of the same RevNet, or of the same reversible language model. Before
the measurement every contestant makes one update from the same weights, which must equal the update of plain autograd. Every
contestant's peak, in bytes of live tensors and in resident memory, is measured in processes of its own. That of torch's 1F1B is the
limit, for each stage, within which ``method.keep=auto`` chooses what blocks store. Afterwards the same methods are simulated for 2,
10 and 18 such stages, with block costs measured in both processes at the same time. Libraries that aren't installed are listed and
skipped (``pip install --no-deps deepspeed torchgpipe``; deepspeed also needs einops, hjson, msgpack, ninja, psutil and py-cpuinfo).
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby, product
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.pipeline_peers import checkpointed, deepspeed, recomputed, torchgpipe
from benchmarks.plan_check import measured_blocks
from benchmarks.report import benchmark_parser, in_processes, installed, numbers, peak_mib, save
from benchmarks.stored_choices import WORKS, Chooser, by_hand
from benchmarks.two_stages import sgd
from launch.bench.contestants import Batches, Contestant, Peer, Setting, petra, torch_schedule
from petra import METHODS, Keep, Method
from petra.cost_model.costs import StageCost, pipeline_costs
from petra.cost_model.event_graph import ZB_H1
from petra.cost_model.machines import Link, measure_link
from petra.cost_model.simulator import predict
from petra.cost_model.stage_memory import LiveBytes
from petra.diagnostics.process_memory import keep_freed_memory
from petra.distributed import all_gather_objects

NOTHING, GRAPH = METHODS["petra"], Method("petra", delay=2, keep=Keep.GRAPH)
CONTESTANTS: dict[str, Peer] = {
    "PETRA, nothing kept": petra(NOTHING, "lockstep"),
    "PETRA, graphs kept": petra(GRAPH, "lockstep"),
    "PETRA, graphs kept, d = 1": petra(replace(GRAPH, delay=1), "edge"),
    "PETRA, nothing kept, d = 1": petra(replace(NOTHING, delay=1), "edge"),
    "petra's 1F1B": petra(METHODS["1f1b"], "edge"),
    "torch 1F1B": torch_schedule("Schedule1F1B"),
    "torch 1F1B, recomputed": recomputed,
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
AUTO = "PETRA, keep=auto"
CHOICES = {
    AUTO: (1, 1.0),
    f"{AUTO}, half the memory": (1, 0.5),
    f"{AUTO}, d = 2": (2, 1.0),
    f"{AUTO}, d = 2, half the memory": (2, 0.5),
}
"""What is chosen: the delay, and the part of the live bytes of :data:`RIVAL` that is the limit of each stage."""
HEADER = (
    "| contestant | ms per microbatch | speed-up: median (lower quartile; min - max) | live MiB | resident MiB "
    "| predicted ms | predicted MiB | stored |"
)
MIB = 2**20


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


def peers(methods: Mapping[str, Method], options: argparse.Namespace) -> dict[str, Peer]:
    """Return the contestants that ``--only`` names, with those whose method was chosen or is written by hand."""
    found = {**CONTESTANTS, **{name: petra(method, "edge") for name, method in methods.items()}}
    return {name: peer for name, peer in found.items() if name == RIVAL or _wanted(name, options)}


def _wanted(name: str, options: argparse.Namespace) -> bool:
    return not options.only or any(name.startswith(part) for part in options.only)


def peak(rank: int, work: str, k: int, name: str, methods: Mapping[str, Method], options: argparse.Namespace) -> tuple[int, float]:
    """Return the most bytes of live tensors as a contestant makes two updates, and the MiB that this process grows by.

    The k microbatches exist before, and are not counted.
    """
    setting, batches = WORKS[work](options).setting(rank, k, options.threads)
    keep_freed_memory()

    def train() -> None:
        run = peers(methods, options)[name](setting, batches)
        run.train(1)
        run.train(1)

    with LiveBytes() as live:
        views = batches.x.detach(), batches.y.detach()
        before = live.now
        resident = peak_mib(train)
    del views
    return live.most - before, resident


def choose(chooser: Chooser, limits: Sequence[int], options: argparse.Namespace) -> dict[str, Method]:
    """Return the methods that are chosen within the limits, where anything fits, and those written by hand that are asked for."""
    chosen = {}
    for name, (delay, part) in CHOICES.items():
        if _wanted(name, options) and (options.by_hand or name == AUTO):
            found = chooser.choose(delay, [int(part * limit) for limit in limits])
            chosen |= {} if found is None else {name: found}
    hand = [pair for delay in (1, 2) for pair in by_hand(options.blocks, delay)] if options.by_hand else []
    return chosen | {name: method for name, method in hand if _wanted(name, options)}


def measure(rank: int, work: str, k: int, limits: Sequence[int], options: argparse.Namespace) -> dict[str, Any]:
    """Return periods and predictions of all contestants, and costs, in one of the two processes.

    Args:
        limits: Bytes of the live tensors of each stage of :data:`RIVAL`.
    """
    keep_freed_memory()
    own = WORKS[work](options)
    link, blocks = measure_link(), measured_blocks(own.model, own.inputs, options.rounds)
    chooser = Chooser(own, k, blocks, link)
    methods = all_gather_objects(choose(chooser, limits, options) if rank == 0 else {})[0]
    setting, batches = own.setting(rank, k, options.threads)
    runs, missing = installed({name: partial(make, setting, batches) for name, make in peers(methods, options).items()})
    before, after = plain_update(setting, batches)
    for name, run in runs.items():
        require_plain_update(name, run, before, after)
    updates = max(1, options.microbatches // k)
    rows = [{name: run.train(updates) for name, run in runs.items()} for _ in range(options.rounds + 1)][1:]
    stages = {str(keep): pipeline_costs([blocks[1 : 1 + options.blocks]] * 2, [[keep] * options.blocks] * 2)[1] for keep in Keep}
    return {
        "periods": {name: [row[name] for row in rows] for name in runs},
        "not_installed": missing,
        "methods": methods,
        "predicted": {name: chooser.predict(method)._asdict() for name, method in methods.items()},
        "costs": {keep: vars(cost) for keep, cost in stages.items()},
        "link": vars(link),
    }


def simulated(costs: dict[str, Any], link: dict[str, float], stages: int, k: int) -> dict[str, float]:
    """Return the simulated seconds per microbatch of each method with this number of equal stages."""
    return {
        name: predict([StageCost(**costs[str(method.keep)])] * stages, method, k, link=Link(**link)).period
        for name, method in SIMULATED.items()
    }


def run_case(work: str, k: int, options: argparse.Namespace) -> dict[str, Any]:
    """Measure all contestants on a network for one k, print the table, and return the figures."""
    limits, alone = [size for size, _ in in_processes(2, peak, work, k, RIVAL, {}, options, start="fork")], {}
    found = in_processes(2, measure, work, k, limits, options)[0]
    methods, periods = found.pop("methods"), found["periods"]
    for name in periods:
        alone[name] = in_processes(2, peak, work, k, name, methods, options, start="fork")
    stored = {name: _runs_of(method.keep) for name, method in methods.items()}
    print(f"\n{work}, k = {k}; speed-up over {RIVAL}, round by round\n\n{HEADER}\n{'|---' * HEADER.count(' | ')}|---|")
    for name, seconds in periods.items():
        faster = quartiles([a / b for a, b in zip(periods[RIVAL], seconds, strict=True)])
        cells = [name, f"{1000 * statistics.median(seconds):.1f}", "{1:.2f} ({0:.2f}; {2:.2f} - {3:.2f})".format(*faster)]
        cells += [" ".join(f"{value:.1f}" for value in row) for row in zip(*((b / MIB, r) for b, r in alone[name]), strict=True)]
        if name in methods:
            period, sizes = found["predicted"][name].values()
            cells += [f"{1000 * period:.1f}", " ".join(f"{size / MIB:.1f}" for size in sizes), stored[name]]
        print(f"| {' | '.join(cells)} |", flush=True)
    print(
        "".join(f"\n{name}: nothing fits" for name in CHOICES if options.by_hand and name not in methods and _wanted(name, options))
    )
    return found | {"stored": stored, "live_bytes_and_resident_mib": alone}


def quartiles(values: Sequence[float]) -> tuple[float, float, float, float]:
    """Return the lower quartile, the median, the minimum and the maximum."""
    lower = statistics.quantiles(values, n=4, method="inclusive")[0] if len(values) > 1 else values[0]
    return lower, statistics.median(values), min(values), max(values)


def _runs_of(keeps: Sequence[Keep]) -> str:
    return ", ".join(f"{len([*own])} {keep}" for keep, own in groupby(keeps))


def main() -> None:
    parser = benchmark_parser(__doc__, 9, images=(64, 8, 16))
    parser.add_argument("--works", nargs="*", default=[*WORKS], choices=WORKS, help="networks")
    parser.add_argument("--k", type=numbers, default="1,2,3,4,8,16,32", help="numbers of microbatches per update")
    parser.add_argument("--blocks", type=int, default=4, help="reversible blocks per stage, 2 or more")
    parser.add_argument("--microbatches", type=int, default=12, help="microbatches of one round of one contestant, but at least k")
    parser.add_argument("--threads", type=int, default=2, help="threads of contestants that run in one process only")
    parser.add_argument("--only", nargs="*", help=f"how names of contestants begin; {RIVAL} always runs")
    parser.add_argument("--by-hand", action="store_true", help="add settings by hand, and choices at d = 2 and in half the memory")
    options = parser.parse_args()

    print(f"Two stages of {options.blocks} blocks, {options.channels} channels, {options.size} pixels, batch {options.batch}")
    figures: dict[str, Any] = {}
    for work in options.works:
        found = {str(k): run_case(work, k, options) for k in options.k}
        last = [*found.values()][-1]
        print("".join(f"\n{name}: not installed" for name in last["not_installed"]))
        print(f"\n{work}: simulated milliseconds per microbatch, equal stages\n\n| stages | k | " + " | ".join(SIMULATED) + " |")
        print("|---" * (len(SIMULATED) + 2) + "|")
        simulations = {}
        for stages, k in product((2, 10, 18), options.k):
            row = simulations[f"stages={stages}, k={k}"] = simulated(last["costs"], last["link"], stages, k)
            print(f"| {stages} | {k} | " + " | ".join(f"{1000 * value:.1f}" for value in row.values()) + " |")
        figures[work] = {"k": found, "simulated": simulations}
    save(options, figures)


if __name__ == "__main__":
    main()
