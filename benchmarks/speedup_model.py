"""Simulate the speed-up of a pipeline with one GPU per stage, from block costs measured on this machine.

python -m benchmarks.speedup_model --out runs/speedup_model.json

1. RevNet-18 on 10 and RevNet-34 on 18 devices: PETRA's speed-up over sequential reversible backpropagation with the paper's
   partition (one block per stage; the paper measured 3.0x and 2.4x), with ``stages=auto``, and with residual blocks split in two.
2. Stages of equal cost: PETRA with keep=nothing or keep=graph against 1F1B at J = 2, 10, 18 and k = 1 ... 32.

Block times are measured on the CPU, not on a GPU. ``--flops`` uses FLOPs instead.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.report import benchmark_parser, machine, save
from petra import METHODS, BlockSpec, Keep, Method, Model, TensorSpec
from petra.cost_model.autotune import tune
from petra.cost_model.costs import BlockCost, StageCost, count_blocks, pipeline_costs, profile_blocks
from petra.cost_model.delays import choose_delays
from petra.cost_model.links import INSTANT, Link
from petra.cost_model.simulator import predict
from petra.models import revnet18, revnet34
from petra.models.revnet import Downsample
from petra.plan.plan import make_plan
from petra.reversible import Coupling
from petra.training import sgd

ONE_F_ONE_B = Method("1f1b", delay=1, keep=Keep.GRAPH, flush=True)
PETRA = METHODS["petra"]
PAPER = {"revnet18": 3.0, "revnet34": 2.4}


class First(nn.Module):
    """First half of a coupling's F: (x1, x2) -> (x1, x2, h). Its inverse drops h."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, x1: Tensor, x2: Tensor) -> tuple[Tensor, ...]:
        return x1, x2, self.part(x2)


class Second(nn.Module):
    """Second half of a coupling's F: (x1, x2, h) -> (x2, x1 + F2(h)). Its backward needs h."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, x1: Tensor, x2: Tensor, h: Tensor) -> tuple[Tensor, ...]:
        return x2, x1 + self.part(h)


class DownFirst(First):
    """First half of a downsampling block: (x1, x2) -> (x1, h)."""

    def forward(self, x1: Tensor, x2: Tensor) -> tuple[Tensor, ...]:
        return x1, self.part(x2)


class DownSecond(nn.Module):
    """Second half of a downsampling block: (x1, h) -> (h, shortcut(x1) + f(h))."""

    def __init__(self, block: Downsample) -> None:
        super().__init__()
        self.second, self.shortcut = block.second, block.shortcut

    def forward(self, x1: Tensor, h: Tensor) -> tuple[Tensor, ...]:
        return h, self.shortcut(x1) + self.second(h)


def halved(model: Model) -> Model:
    """Return the same network with every residual block split into two blocks between its convolutions."""
    blocks: list[BlockSpec] = []
    with torch.device("meta"):
        kinds = [spec.build() for spec in model.blocks]
    for spec, kind in zip(model.blocks, kinds, strict=True):
        if isinstance(kind, Coupling | Downsample):
            blocks += [BlockSpec(f"{spec.name}.{half}", partial(_half, spec.build, half)) for half in (0, 1)]
        else:
            blocks.append(spec)
    return Model(f"{model.name}, halved", tuple(blocks))


def _half(build: Callable[[], nn.Module], half: int) -> nn.Module:
    block = build()
    if isinstance(block, Downsample):
        return DownSecond(block) if half else DownFirst(block.first)
    assert isinstance(block, Coupling)
    layers = list(block.f.children())  # type: ignore[union-attr]
    middle = len(layers) // 2
    return Second(nn.Sequential(*layers[middle:])) if half else First(nn.Sequential(*layers[:middle]))


def images(options: argparse.Namespace) -> TensorSpec:
    """Return the spec of a microbatch of images."""
    return TensorSpec((options.batch, 3, options.size, options.size), torch.float32)


def one_block_per_stage(model: Model, costs: Sequence[BlockCost], options: argparse.Namespace) -> list[StageCost]:
    """Return the costs of PETRA's stages with one block each."""
    return pipeline_costs([[cost] for cost in costs], [stage.keeps for stage in make_plan(model, images(options)).stages])


def block_costs(model: Model, options: argparse.Namespace) -> tuple[BlockCost, ...]:
    """Return the measured or counted costs of a model's blocks."""
    if options.flops:
        return count_blocks(model, images(options))
    optimizer = partial(sgd, momentum=0.9, nesterov=True, weight_decay=5e-4)
    return profile_blocks(model, images(options), optimizer=optimizer, channels_last=True, rounds=options.rounds)


def speedups(name: str, stages: int, options: argparse.Namespace) -> dict[str, Any]:
    """Return PETRA's speed-up on ``stages`` devices over sequential reversible backpropagation, for several partitions.

    Updates are left out on both sides.
    """
    model = {"revnet18": revnet18, "revnet34": revnet34}[name](width=options.width, stem=options.stem)
    whole, halves = ([replace(c, update=0.0) for c in block_costs(m, options)] for m in (model, halved(model)))
    link = Link(bandwidth=1e9 * options.bandwidth, latency=1e-6 * options.latency) if not options.flops else INSTANT
    paper = one_block_per_stage(model, whole, options)
    sequential_whole = predict(paper, METHODS["reversible"], link=link).period
    finer = one_block_per_stage(halved(model), halves, options)
    # Half blocks are measured separately from whole blocks. Compare with the faster of the two sequential runs.
    sequential = min(sequential_whole, sum(c.forward + c.backward for c in finer))
    partitions: dict[str, Sequence[StageCost]] = {
        "one block per stage (the paper)": paper,
        "stages=auto, whole blocks": tune(whole, PETRA, 1, stages).costs,
        "stages=auto, half blocks": tune(halves, PETRA, 1, stages).costs,
        "stages=auto, half blocks, keep=graph": tune(halves, replace(PETRA, keep=Keep.GRAPH), 1, stages).costs,
    }
    rows = {}
    for partition, costs in partitions.items():
        prediction = predict(costs, PETRA, link=link)
        delays = choose_delays(costs, PETRA, 1, link=link) if partition.startswith("stages=auto, half blocks") else None
        rows[partition] = {
            "stages": len(costs),
            "period": prediction.period,
            "speedup": sequential / prediction.period,
            "efficiency": prediction.efficiency,
            "slowest_over_mean": prediction.compute * len(costs) / sum(c.forward + c.backward for c in costs),
            "smallest_delays": delays,
        }
    blocks = {c.name: [c.forward, c.backward, c.graph_forward, c.graph_backward] for c in halves}
    return {"sequential": sequential, "partitions": rows, "half_blocks": blocks, "paper_speedup": PAPER[name]}


def against_1f1b(stages: int, k: int) -> dict[str, float]:
    """Return simulated periods of stages of equal cost, in units of a forward."""
    nothing, graph = StageCost(1, 3), StageCost(1, 2)
    return {
        "petra, keep=nothing": predict([nothing] * stages, PETRA, k).period,
        "petra, keep=graph": predict([graph] * stages, PETRA, k).period,
        "1f1b": predict([graph] * stages, ONE_F_ONE_B, k).period,
    }


def main() -> None:
    parser = benchmark_parser(__doc__, 3, "measurements of each block; the fastest counts")
    parser.add_argument("--batch", type=int, default=64, help="images per microbatch")
    parser.add_argument("--size", type=int, default=32, help="side of an image in pixels")
    parser.add_argument("--width", type=float, default=1.0, help="factor of the number of channels")
    parser.add_argument("--stem", choices=("cifar", "imagenet"), default="cifar", help="first block of the network")
    parser.add_argument("--flops", action="store_true", help="use FLOPs as costs and instant links")
    parser.add_argument("--bandwidth", type=float, default=float("inf"), help="bandwidth of a link in each direction (GB/s)")
    parser.add_argument("--latency", type=float, default=0.0, help="latency of a link (microseconds)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    figures: dict[str, Any] = {"machine": machine(), "options": vars(options), "speedups": {}, "periods": {}}
    for name, stages in (("revnet18", 10), ("revnet34", 18)):
        figure = figures["speedups"][name] = speedups(name, stages, options)
        print(f"{name} on {stages} devices, speed-up over sequential backpropagation (the paper measured {PAPER[name]}x)\n")
        print("| partition | stages | speed-up | slowest stage / mean | smallest delays |\n|---|---|---|---|---|")
        for partition, row in figure["partitions"].items():
            delays = "" if row["smallest_delays"] is None else " ".join(map(str, row["smallest_delays"]))
            print(f"| {partition} | {row['stages']} | {row['speedup']:.2f} | {row['slowest_over_mean']:.2f} | {delays} |")
        print()
    print("Period in units of a forward, stages of equal cost\n")
    print("| J | k | PETRA, nothing | PETRA, graph | 1F1B |\n|---|---|---|---|---|")
    for stages in (2, 10, 18):
        for k in (1, 2, 3, 4, 8, 16, 32):
            periods = figures["periods"][f"J={stages}, k={k}"] = against_1f1b(stages, k)
            print(f"| {stages} | {k} | " + " | ".join(f"{period:.2f}" for period in periods.values()) + " |")
    save(options.out, figures)


if __name__ == "__main__":
    main()
